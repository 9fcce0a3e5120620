// Draws every figure as it comes near the screen, in the colours of the page, and again when those change.
const [figures, config, dark, looks, clocks, all] = ["figures", "config", "dark", "looks", "clocks", "all-metrics"].map(
  (id) => JSON.parse(document.getElementById(id).textContent));
for (const datasets of Object.values(figures).map((spec) => spec.datasets))
  for (const [name, { columns }] of Object.entries(datasets)) {
    if (!columns) continue;
    for (const [key, { runs }] of Object.entries(columns))
      if (runs) columns[key] = runs.flatMap(([value, count]) => Array(count).fill(value));
    const rows = Object.values(columns)[0].map((_, index) => Object.entries(columns).map(([key, all]) => [key, all[index]]));
    datasets[name] = rows.map(Object.fromEntries);
  }
const scheme = window.matchMedia("(prefers-color-scheme: dark)");
const printing = window.matchMedia("print");
const drawn = new Map();

function recolour(spec) {
  if (!scheme.matches || printing.matches) return spec;
  const text = JSON.stringify(spec).replace(/#[0-9a-f]{6}\b/g, (colour) => dark[colour] ?? colour);
  return JSON.parse(text);
}

// The total of a clock up to a step; beyond its ends, time runs as between the last two points.
function total([steps, totals], step) {
  let right = steps.findIndex((one) => one >= step);
  right = Math.max(right < 0 ? steps.length - 1 : right, 1);
  const share = (step - steps[right - 1]) / (steps[right] - steps[right - 1]);
  return steps.length < 2 ? totals[0] : totals[right - 1] + share * (totals[right] - totals[right - 1]);
}

// The figure over the x axis that is chosen, without the lines that are switched off; the page has their legend.
const axis = document.getElementById("axis");
const boxes = [...document.querySelectorAll("#view input")];
const kept = `x axis of ${location.pathname}`; // a page that reloads itself keeps it
try {
  if (axis) axis.value = sessionStorage.getItem(kept) ?? "";
  axis?.addEventListener("change", () => sessionStorage.setItem(kept, axis.value));
} catch {} // the browser stores nothing
function viewed(spec) {
  const clock = clocks[axis?.value || NaN], hidden = boxes.filter((box) => !box.checked).map((box) => box.value);
  const at = (run, step) => total(clock.lines[run ?? ""], step);
  const moved = (row) => ({ ...row, at: at(row.run, row.step), until: "end" in row ? at(row.run, row.end) : undefined });
  const rows = (all) => all.filter((row) => !hidden.includes(row.run)).map((row) => (clock && "step" in row ? moved(row) : row));
  const range = ([first, last]) => {
    const own = Object.values(clock.lines); // runs end at different steps: only a single one is drawn beyond its end
    if (own.length === 1) return [total(own[0], first), total(own[0], last)];
    return [Math.min(...own.map(([, totals]) => totals[0])), Math.max(...own.map(([, totals]) => totals.at(-1)))];
  };
  const channel = (name, one) => {
    if (name === "x2" && clock) return { ...one, field: "until" };
    if (name === "x" && clock && one.field === "step") {
      const domain = one.scale.domain && range(one.scale.domain);
      return { ...one, field: "at", title: clock.title, axis: { labelExpr: clock.labels, tickCount: 6 }, scale: { ...one.scale, domain } };
    }
    return one.scale?.domain?.every?.((line) => boxes.some((box) => box.value === line)) ? { ...one, legend: null } : one;
  };
  const encoding = (all) => Object.fromEntries(Object.entries(all).map(([name, one]) => [name, channel(name, one)]));
  return {
    ...spec,
    datasets: Object.fromEntries(Object.entries(spec.datasets).map(([name, all]) => [name, rows(all)])),
    layer: spec.layer.map((layer) => ({ ...layer, encoding: encoding(layer.encoding) })),
  };
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
  drawn.set(key, await vegaEmbed(place, recolour(viewed(figures[key])), options));
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
const view = document.getElementById("view");
document.documentElement.style.scrollPaddingTop = `${view.offsetHeight + 12}px`;
view.addEventListener("change", () => places.forEach((place) => {
  near.unobserve(place);
  near.observe(place);
}));
view.querySelector("button")?.addEventListener("click", () => {
  const every = boxes.every((box) => box.checked);
  for (const box of boxes) box.checked = !every;
  view.dispatchEvent(new Event("change"));
});

// Every logged metric, grouped by prefix, found by a search, drawn when it is opened.
function showAllMetrics(section, { runs, metrics }) {
  const [search, mean, log] = section.querySelectorAll("input[type=search], select, input[type=checkbox]");
  const made = (tag, parent, text = "") => {
    const one = document.createElement(tag);
    one.textContent = text;
    return parent.appendChild(one);
  };
  const rows = (name) => metrics[name].flatMap(([number, steps, values]) => {
    let step = 0;
    return steps.map((more, index) => ({ step: (step += more), value: values[index], run: runs[number][0], number }));
  });
  const spec = (name) => {
    const over = Number(mean.value), all = rows(name), few = all.length < 60;
    const type = !log.checked ? "linear" : all.every((row) => row.value > 0) ? "log" : "symlog";
    const domain = Object.keys(looks), [colours, dashes] = [0, 1].map((at) => domain.map((line) => looks[line][at]));
    const line = (field, opacity) => ({
      mark: { type: "line", opacity, clip: true, tooltip: true, point: few && { size: 22 } },
      encoding: {
        x: { field: "step", type: "quantitative", axis: { format: "d", tickMinStep: 1, tickCount: 10 }, scale: { nice: false, zero: false } },
        y: { field, type: "quantitative", title: null, scale: { type, zero: false } },
        color: { field: "run", scale: { domain, range: colours }, legend: null },
        strokeDash: { field: "run", scale: { domain, range: dashes.map((dash) => (dash.length ? dash : [1, 0])) }, legend: null },
        detail: { field: "number" },
      },
    });
    return {
      width: "container", height: 180, config, datasets: { all }, data: { name: "all" },
      transform: [{ window: [{ op: "mean", field: "value", as: "mean" }], groupby: ["number"], frame: [1 - over, 0] }],
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
    const several = runs.length > 1, quoted = (text) => `"${text.replaceAll('"', '""')}"`;
    const row = ({ number, step, value }) => `${several ? runs[number].map(quoted).join(",") + "," : ""}${step},${value}`;
    link.href = URL.createObjectURL(new Blob([[`${several ? "line,run," : ""}step,value`, ...rows(name).map(row)].join("\n")]));
    link.download = `${name.replaceAll("/", "_")}.csv`;
    if (metrics[name].some((one) => one[3])) made("small", details, " the least and the largest reading of each stretch of steps");
    places.push(place);
    show(place);
  };
  const groups = new Map();
  for (const name of Object.keys(metrics)) {
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
  const none = made("p", section, "no metric matches");
  none.hidden = true;
  search.addEventListener("input", () => {
    const hits = [];
    for (const [prefix, group] of groups) {
      const names = [...group.querySelectorAll("[data-name]")];
      for (const one of names) one.hidden = !one.dataset.name.toLowerCase().includes(search.value.toLowerCase());
      const found = names.filter((one) => !one.hidden);
      group.querySelector("summary").textContent = `${prefix} (${found.length})`;
      group.hidden = !found.length;
      group.open = search.value !== "" && !group.hidden;
      hits.push(...found);
    }
    none.hidden = hits.length > 0;
    if (hits.length === 1) hits[0].open = true;
  });
  for (const control of [mean, log])
    control.addEventListener("change", () => section.querySelectorAll(".chart").forEach(show));
}
const metricsSection = document.getElementById("metrics");
if (metricsSection) showAllMetrics(metricsSection, all);
