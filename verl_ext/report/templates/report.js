// Draws every figure as it comes near the screen, in the colours of the page, and again when those change.
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const datasets of Object.values(figures).map((spec) => spec.datasets))
  for (const [name, { columns }] of Object.entries(datasets)) {
    if (!columns) continue;
    for (const [key, { runs }] of Object.entries(columns))
      if (runs) columns[key] = runs.flatMap(([value, count]) => Array(count).fill(value));
    const rows = Object.values(columns)[0].map((_, index) => Object.entries(columns).map(([key, all]) => [key, all[index]]));
    datasets[name] = rows.map(Object.fromEntries);
  }
const dark = JSON.parse(document.getElementById("dark").textContent);
const scheme = window.matchMedia("(prefers-color-scheme: dark)");
const printing = window.matchMedia("print");
const drawn = new Map();

function recolour(spec) {
  if (!scheme.matches || printing.matches) return spec;
  const text = JSON.stringify(spec).replace(/#[0-9a-f]{6}\b/g, (colour) => dark[colour] ?? colour);
  return JSON.parse(text);
}

async function draw(place) {
  const key = place.dataset.figure;
  const theme = scheme.matches ? "dark" : "light";
  drawn.get(key)?.finalize();
  const options = {
    renderer: "canvas", // vega-embed's default is SVG: 10,000 elements for one heat map
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: key,
    tooltip: { theme },
  };
  drawn.set(key, await vegaEmbed(place, recolour(figures[key]), options));
  if (theme !== (scheme.matches ? "dark" : "light")) return draw(place); // the scheme changed while it was drawn
  place.dataset.drawn = theme;
}

const places = [...document.querySelectorAll("[data-figure]")];
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    near.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "600px" });
for (const place of places) near.observe(place);
scheme.addEventListener("change", () => places.filter((place) => drawn.has(place.dataset.figure)).forEach(draw));
window.addEventListener("beforeprint", () => places.forEach(draw));

// Every logged metric, grouped by prefix, found by a search, drawn when it is opened.
function showAllMetrics(section, all) {
  const config = JSON.parse(document.getElementById("config").textContent);
  const [search, mean, log] = section.querySelectorAll("input[type=search], select, input[type=checkbox]");
  const made = (tag, parent, text = "") => {
    const one = document.createElement(tag);
    one.textContent = text;
    return parent.appendChild(one);
  };
  const rows = (name) => {
    let step = 0;
    return all[name][0].map((more, index) => ({ step: (step += more), value: all[name][1][index] }));
  };
  const spec = (name) => {
    const over = Number(mean.value), values = rows(name);
    const type = !log.checked ? "linear" : values.every((row) => row.value > 0) ? "log" : "symlog";
    const line = (field, opacity) => ({
      mark: { type: "line", color: "#0072b2", opacity, clip: true, tooltip: true, point: values.length < 60 && { size: 22 } },
      encoding: { y: { field, type: "quantitative", title: null, scale: { type, zero: false } } },
    });
    return {
      width: "container", height: 180, config, data: { values },
      transform: [{ window: [{ op: "mean", field: "value", as: "mean" }], frame: [1 - over, 0] }],
      encoding: { x: { field: "step", type: "quantitative", axis: { format: "d", tickMinStep: 1, tickCount: 10 }, scale: { nice: false, zero: false } } },
      layer: over > 1 ? [line("value", 0.3), line("mean", 1)] : [line("value", 1)],
    };
  };
  const show = (place) => {
    figures[place.dataset.figure] = spec(place.dataset.figure);
    draw(place);
  };
  const open = (name, details) => {
    if (!details.open || details.querySelector(".chart")) return;
    const place = made("div", details), link = made("a", details, "CSV");
    place.className = "chart";
    place.dataset.figure = name;
    link.href = URL.createObjectURL(new Blob([["step,value", ...rows(name).map((row) => `${row.step},${row.value}`)].join("\n")]));
    link.download = `${name.replaceAll("/", "_")}.csv`;
    if (all[name][2]) made("small", details, " the least and the largest reading of each stretch of steps");
    places.push(place);
    show(place);
  };
  const groups = new Map();
  for (const name of Object.keys(all)) {
    const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "others";
    if (!groups.has(prefix)) groups.set(prefix, made("details", section));
    const details = made("details", groups.get(prefix));
    details.dataset.name = name;
    made("summary", details, name);
    details.addEventListener("toggle", () => open(name, details));
  }
  for (const [prefix, group] of groups) {
    const title = document.createElement("summary");
    title.textContent = `${prefix} (${group.children.length})`;
    group.prepend(title);
  }
  search.addEventListener("input", () => {
    for (const group of groups.values()) {
      const names = [...group.querySelectorAll("[data-name]")];
      for (const one of names) one.hidden = !one.dataset.name.toLowerCase().includes(search.value.toLowerCase());
      group.hidden = names.every((one) => one.hidden);
      group.open = search.value !== "" && !group.hidden;
    }
  });
  for (const control of [mean, log])
    control.addEventListener("change", () => section.querySelectorAll(".chart").forEach(show));
}
const metricsSection = document.getElementById("metrics");
if (metricsSection) showAllMetrics(metricsSection, JSON.parse(document.getElementById("all-metrics").textContent));
