"""Schemas of the files that runs and studies leave, each with one reader and one writer.

files      how a file of records is written, and read or refused
runs       a run's folder          metrics    its metrics.jsonl        arrays   its mixes.npz and pictures.npz
manifest   study.json, what was asked and measured                     results  results.json and .csv, what was found
reading    a whole study's folder, read back                           tuning   a fine-tuning's folder
surroundings  the machine that something ran on

Needs neither torch nor transformers. The names of files stand here and nowhere else.
"""
