// Draws every figure as it comes near the screen, in the colours of the page, and again when those change.
const figures = JSON.parse(document.getElementById("figures").textContent);
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
