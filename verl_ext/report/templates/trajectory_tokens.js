// The response as one span per token, and the strip above it.

const response = document.getElementById("response");
const map = document.getElementById("map");

// Characters that are invisible or reverse the text: a dump is read to find exactly these.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const codePoint = (character) => `⟨${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;

/** A token's text for reading: newlines marked and kept. The mark is drawn by the style sheet and is not copied. */
function pieces(text) {
  const out = [];
  text.replace(INVISIBLE, codePoint).split("\n").forEach((line, n) => {
    if (n > 0) out.push(make("span", "", "nl"), "\n");
    if (line) out.push(line);
  });
  return out;
}

/** Spans of tokens `from` to `to`, the tokens of one character held together. */
function stretch(t, from, to, spans) {
  const out = document.createDocumentFragment();
  let waiting = []; // tokens without text, perhaps the first bytes of a character
  for (let i = from; i < to; i++) {
    const span = make("span", pieces(t.text[i]));
    span.dataset.i = i;
    spans.push(span);
    if (t.text[i] === "") {
      span.dataset.part = "";
      waiting.push(span);
      continue;
    }
    // Before ASCII they are not parts of a character, but tokens without text, such as an end mark.
    const joined = waiting.length && t.text[i].codePointAt(0) > 127;
    out.append(...(joined ? [make("span", [...waiting, span], "join")] : [...waiting, span]));
    waiting = [];
  }
  out.append(...waiting);
  return out;
}

/** The position of token i in the whole response. */
function position(t, i) {
  for (let n = 0, before = 0; n < t.start.length; before += t.length[n], n++) {
    if (i < before + t.length[n]) return t.start[n] + i - before;
  }
  return NaN;
}

/** The token at a position of the whole response, -1 where it was left out. */
function tokenAt(t, at) {
  for (let n = 0, before = 0; n < t.start.length; before += t.length[n], n++) {
    if (at >= t.start[n] && at < t.start[n] + t.length[n]) return before + at - t.start[n];
  }
  return -1;
}

function drawResponse(t) {
  const spans = [];
  const out = document.createDocumentFragment();
  const cut = (count) => {
    const words = `${count.toLocaleString("en")} token${count > 1 ? "s" : ""} left out here`;
    if (count > 0) out.append(make("div", words, "cut"));
  };
  let end = 0;
  t.start.forEach((start, n) => {
    cut(start - end);
    out.append(stretch(t, spans.length, spans.length + t.length[n], spans));
    end = start + t.length[n];
  });
  cut(t.tokens - end);
  if (!spans.length) out.append(make("p", "The response has no tokens.", "hint"));
  response.replaceChildren(out);
  return spans;
}

function colourTokens(name, t, spans) {
  response.className = `by-${name}`;
  spans.forEach((span, i) => {
    span.className = tokenClass(name, t, i) + (span.dataset.part === undefined ? "" : " part");
  });
}

/** Draws the strongest token in each column of the strip: a mean would hide single outliers. */
function drawMap(name, t) {
  const canvas = map.firstElementChild;
  const scale = window.devicePixelRatio || 1;
  const width = (canvas.width = Math.round(map.clientWidth * scale));
  const height = (canvas.height = Math.round(map.clientHeight * scale));
  const count = t.text.length;
  const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  const [muted, tool] = ["--muted", "--line"].map((variable) => style.getPropertyValue(variable));
  const pen = canvas.getContext("2d");
  const colours = name === "masked" ? null : ramp(name, theme);
  const strong = { kept: 0, tool: 1, filtered: 2, dropped: 3 };
  canvas.setAttribute("aria-label", `${MODES[name].label} along the response, strongest token per column`);
  if (!count) return;
  const column = Math.max(scale, width / count);
  for (let x = 0; x < width; x += column) {
    const from = Math.min(Math.floor((x / width) * count), count - 1);
    const to = Math.max(from + 1, Math.min(count, Math.floor(((x + column) / width) * count)));
    let [most, which] = [-1, "kept"];
    for (let i = from; i < to; i++) {
      const now = kind(t, i);
      if (strong[now] > strong[which]) which = now;
      if (colours && now !== "tool") most = Math.max(most, level(MODES[name], MODES[name].of(t, i)) || 0);
    }
    const tall = colours ? (most < 0 ? 1 : most / LEVELS) : which === "kept" ? 0 : 1;
    pen.fillStyle = !colours && which !== "tool" ? KINDS[which].colour || tool : most > 0 ? colours[most - 1] : tool;
    pen.fillRect(x, height * (1 - tall), Math.max(column, 1), height * tall);
  }
  pen.fillStyle = muted;
  t.length.slice(0, -1).reduce((before, length) => {
    for (let y = 0; y < height; y += 6 * scale) {
      pen.fillRect(((before + length) / count) * width - scale, y, 2 * scale, 3 * scale);
    }
    return before + length;
  }, 0);
}

/** Marks on the strip the part that is on the screen: spans are in reading order, so bisection finds its ends. */
function drawWindow(spans) {
  const mark = map.lastElementChild;
  mark.hidden = !spans.length;
  if (!spans.length) return;
  const covers = getComputedStyle(map.parentElement).position === "sticky";
  const top = covers ? map.getBoundingClientRect().bottom : 0;
  const first = bisect(spans, (span) => span.getBoundingClientRect().bottom > top);
  const last = bisect(spans, (span) => span.getBoundingClientRect().top > innerHeight);
  mark.style.left = `${(100 * first) / spans.length}%`;
  mark.style.width = `${(100 * Math.max(last - first, 0)) / spans.length}%`;
}

function bisect(spans, is) {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (is(spans[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}
