// Handlers of mouse, keyboard and window events; then the start.

const spanOf = (event) => event.target.closest && event.target.closest(".t");

response.addEventListener("mouseover", (event) => {
  const span = spanOf(event);
  if (state.pinned !== null) return;
  if (span) showTip(state.t, span, false);
  else hideTip();
});
response.addEventListener("mouseleave", () => state.pinned === null && hideTip());
response.addEventListener("click", (event) => {
  const span = spanOf(event);
  if (!span) return;
  if (state.pinned === +span.dataset.i) unpin();
  else select(+span.dataset.i, true);
});
document.addEventListener("click", (event) => {
  if (state.pinned !== null && !event.target.closest("#response, #tip, #switch, #summary, #map")) unpin();
});

map.addEventListener("click", (event) => {
  const box = map.getBoundingClientRect();
  const i = Math.floor(((event.clientX - box.left) / box.width) * state.spans.length);
  unpin();
  goTo(Math.min(i, state.spans.length - 1), false);
  hideTip();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  const inResponse = document.activeElement === response && state.spans.length > 0;
  const inList = byId("rows").contains(document.activeElement);
  const last = state.spans.length - 1;
  const now = state.token ?? -1;
  const tokens = { ArrowRight: Math.min(now + 1, last), ArrowLeft: Math.max(now - 1, 0), Home: 0, End: last };
  if (event.key === "Escape") unpin();
  else if (inResponse && event.key in tokens) walkTokens(tokens[event.key]);
  else if (inResponse && event.key === "Enter" && now >= 0) select(now, true);
  else if (event.key === "j" || event.key === "ArrowRight" || (inList && event.key === "ArrowDown")) walk(1);
  else if (event.key === "k" || event.key === "ArrowLeft" || (inList && event.key === "ArrowUp")) walk(-1);
  else return;
  event.preventDefault();
});

function walkTokens(i) {
  const box = state.spans[i].getBoundingClientRect();
  if (box.top < map.getBoundingClientRect().bottom || box.bottom > innerHeight - 40) goTo(i, false);
  else select(i, false);
}

// The tip stays in place while the text scrolls: hide it, or move a pinned one along.
let waiting = false;
document.addEventListener(
  "scroll",
  () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawWindow(state.spans);
      if (state.token !== null && !tip.hidden) showTip(state.t, state.spans[state.token], state.pinned !== null);
      else hideTip();
    });
  },
  { capture: true, passive: true }
);
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
byId("prompt").addEventListener("toggle", () => drawWindow(state.spans));
addEventListener("hashchange", openHash);
byId("filters").addEventListener("input", drawList);
byId("filters").addEventListener("submit", (event) => event.preventDefault());

document.head.append(make("style", colourRules()));
for (const why of new Set(index.map((row) => row.why).filter(Boolean))) {
  const option = make("option", why);
  option.value = why;
  byId("why").append(option);
}
drawList();
openHash();
