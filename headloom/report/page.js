"use strict";
(() => {
  const { themes, longest, sections } = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let drawn = [];
  let width = 0;
  const draw = async () => {
    drawn.forEach((result) => result.finalize());
    drawn = [];
    width = document.documentElement.clientWidth;
    for (const { datasets, renderer, panels } of sections) {
      for (const [name, panel] of Object.entries(panels)) {
        const place = document.getElementById("figure-" + name);
        const room = place.clientWidth;
        const narrow = room < 520;
        const config = structuredClone(themes[dark.matches ? "dark" : "light"]);
        const limit = narrow ? room - 60 : config.legend.labelLimit;
        config.legend.labelLimit = limit;
        config.legend.columns = Math.max(1, Math.min(8, Math.floor(room / (34 + Math.min(limit, 8 * longest)))));
        if (narrow) {
          config.axisY.labelLimit = 110;
          config.axis.titleFontSize = 12;
        }
        const spec = { ...structuredClone(panel), datasets };
        if (spec.usermeta) {
          const { columns, width, margin } = spec.usermeta;
          spec.columns = Math.max(1, Math.min(columns, Math.round(room / (width + margin))));
          const scale = Math.min(1.2, ((room - 12) / spec.columns - margin) / width);
          spec.concat.forEach((map) => {
            map.width = Math.floor(map.width * scale);
            map.height = Math.floor(map.height * scale);
          });
        }
        const options = { mode: "vega-lite", renderer, ast: true, config, actions: false };
        drawn.push(await vegaEmbed(place, spec, options));
      }
    }
  };
  dark.addEventListener("change", draw);
  // Grids do not follow the width by themselves; a telephone that is turned round gets new ones.
  window.addEventListener("resize", () => {
    if (Math.abs(document.documentElement.clientWidth - width) > 100) draw();
  });
  draw();
})();
