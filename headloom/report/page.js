"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => {
    const ink = dark.matches ? "#e6e9ee" : "#1b1f26";
    const soft = dark.matches ? "#a0a8b5" : "#59616e";
    const line = dark.matches ? "#343a45" : "#dde1e7";
    return {
      background: "transparent",
      font: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif",
      view: { stroke: line },
      axis: { labelColor: soft, titleColor: ink, gridColor: line, domainColor: soft, tickColor: soft,
              labelFontSize: 12, titleFontSize: 13, titleFontWeight: 500 },
      legend: { labelColor: ink, titleColor: ink, labelFontSize: 13 },
      title: { color: ink },
    };
  };
  let drawn = [];
  const draw = async () => {
    drawn.forEach((result) => result.finalize());
    drawn = [];
    for (const [name, spec] of Object.entries(specs)) {
      const place = document.getElementById("figure-" + name);
      const narrow = place.clientWidth < 520;
      const config = theme();
      config.legend.columns = narrow ? 2 : 4;
      drawn.push(await vegaEmbed(place, structuredClone(spec), {
        renderer: "svg", ast: true, config,
        actions: false,
      }));
    }
  };
  dark.addEventListener("change", draw);
  draw();
})();
