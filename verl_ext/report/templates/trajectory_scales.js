// The meaning of a token's colour: one scale per switch, with the same domain in every trajectory and run.

const LEVELS = 18; // colours per ramp, above the "nothing to see" of level 0

// Light to strong on the theme's own background. One hue each, lightness monotone: legible without colour vision.
const RAMPS = {
  gap: {
    light: ["#fff3e4", "#fdd6a8", "#fbab62", "#ea7425", "#b8430b", "#6e2304"],
    dark: ["#2c2018", "#5a3315", "#964c12", "#d8741d", "#ffae58", "#ffe9c4"],
  },
  agreement: {
    light: ["#edf2fc", "#c8d7f3", "#92aee4", "#5479ca", "#2c4da0", "#14296a"],
    dark: ["#1b2333", "#24396a", "#2f54a3", "#4d80dc", "#92baf8", "#dfebff"],
  },
  probability: {
    light: ["#e8f5f1", "#bbe3d8", "#79c4b0", "#339e87", "#0b6e5c", "#02403a"],
    dark: ["#172926", "#15463c", "#19705f", "#2ea38b", "#82d7c2", "#e0f7f0"],
  },
};
// Okabe-Ito, mixed into the background; a strike and dots in the style sheet show the same without colour.
const KINDS = {
  kept: { label: "kept", colour: null },
  dropped: { label: "dropped by correction", colour: "#d55e00" },
  filtered: { label: "taken out of the mask", colour: "#56b4e9" },
  tool: { label: "not the model's", colour: null },
};
const PAPER = { light: "#ffffff", dark: "#14171b" };

// `of` returns the quantity that grows with the trouble, NaN if it is unknown; `low` is where colour begins.
const MODES = {
  gap: {
    label: "Gap",
    of: (t, i) => Math.abs(logK(t, i)),
    low: 0.001,
    high: 1,
    ticks: [["first", "≤0.001"], [0.01, "0.01"], [0.1, "0.1"], ["last", "1+"]],
    how:
      "|log k|, the distance of training's log-prob from the rollout's. Single strong tokens of low probability are " +
      "normal. Long stretches, or everything after one point, mean that the engines disagree about the context: look " +
      "for retokenisation, truncation or a stale rollout.",
  },
  agreement: {
    label: "Routing agreement",
    of: (t, i) => (t.agreement[i] === null ? NaN : 1 - t.agreement[i]),
    low: 0.02,
    high: 0.5,
    ticks: [["first", "≥98%"], [0.05, "95%"], [0.1, "90%"], [0.2, "80%"], ["last", "≤50%"]],
    how:
      "The share of experts that both engines chose. Single strong tokens are near-ties in the router. Whole " +
      "stretches that also show a gap mean that the engines route differently: replay the rollout's routes " +
      "(stability=r3), or raise the router's precision.",
  },
  probability: {
    label: "Probability",
    of: (t, i) => (t.l_infer[i] === null ? NaN : Math.exp(-t.l_infer[i])),
    low: 1 / 0.7,
    high: 1000,
    ticks: [["first", "≥0.7"], [3.3333333, "0.3"], [10, "0.1"], [100, "0.01"], ["last", "≤0.001"]],
    how:
      "The probability that the rollout gave the token; strong is unlikely. Gaps grow as it falls, so compare with " +
      "Gap: look into a large gap on a likely (pale) token.",
  },
  masked: {
    label: "Masked",
    how:
      "The tokens that take part in the loss. A few dropped ones are the correction at work. If whole stretches are " +
      "dropped, look at Gap there first: fix the disagreement rather than widen the bounds.",
  },
};

/** Signed log k; NaN where one of the two is missing. */
function logK(t, i) {
  return t.l_old[i] === null || t.l_infer[i] === null ? NaN : t.l_old[i] - t.l_infer[i];
}

/** 0 below `low`, LEVELS from just under `high`, NaN where unknown. */
function level(mode, value) {
  if (Number.isNaN(value)) return NaN;
  const share = Math.log(value / mode.low) / Math.log(mode.high / mode.low);
  return share < 0 ? 0 : Math.min(LEVELS, 1 + Math.floor(share * LEVELS));
}

/** The correction comes before the filters: if both took a token out, it counts as dropped by the correction. */
function kind(t, i) {
  if (t.generated[i] === "0") return "tool";
  if (t.weight && t.weight[i] === 0) return "dropped";
  return t.kept[i] === "0" ? "filtered" : "kept";
}

function mix(from, to, share) {
  const part = (text, at) => parseInt(text.slice(at, at + 2), 16);
  const one = (at) => Math.round(part(from, at) + (part(to, at) - part(from, at)) * share);
  return "#" + [1, 3, 5].map((at) => one(at).toString(16).padStart(2, "0")).join("");
}

function ramp(name, theme) {
  const stops = RAMPS[name][theme];
  return Array.from({ length: LEVELS }, (_, n) => {
    const at = (n / (LEVELS - 1)) * (stops.length - 1);
    const below = Math.min(Math.floor(at), stops.length - 2);
    return mix(stops[below], stops[below + 1], at - below);
  });
}

function kindColour(name, theme) {
  const { colour } = KINDS[name];
  return colour && mix(PAPER[theme], colour, theme === "light" ? 0.32 : 0.42);
}

/** Black or white: one of the two reaches a contrast of 4.5 on every colour. */
function inkOn(colour) {
  const linear = (at) => {
    const v = parseInt(colour.slice(at, at + 2), 16) / 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  };
  return 0.2126 * linear(1) + 0.7152 * linear(3) + 0.0722 * linear(5) > 0.179 ? "#000000" : "#ffffff";
}

/** One rule per colour and theme, so that a switch or a change of theme touches classes only. */
function colourRules() {
  const rule = (selector, colour) => `${selector}{background:${colour};color:${inkOn(colour)}}`;
  const rules = (theme) =>
    [
      ...Object.keys(RAMPS).flatMap((name) =>
        ramp(name, theme).map((colour, n) => rule(`.by-${name} .l${n + 1}`, colour))
      ),
      ...Object.keys(KINDS)
        .filter((name) => KINDS[name].colour)
        .map((name) => rule(`.by-masked .c-${name}`, kindColour(name, theme))),
    ].join("\n");
  return `${rules("light")}\n@media screen and (prefers-color-scheme: dark){\n${rules("dark")}\n}`;
}

/** The class of a token's span under a switch. */
function tokenClass(name, t, i) {
  const which = kind(t, i);
  if (which === "tool") return "t tool";
  if (name === "masked") return `t c-${which}`;
  const step = level(MODES[name], MODES[name].of(t, i));
  return Number.isNaN(step) ? "t missing-number" : `t l${step}`;
}

function legend(name) {
  if (name === "masked") {
    const shown = Object.entries(KINDS).map(([kind, { label }]) => {
      const entry = make("span", label);
      entry.className = kind === "tool" ? "tool" : `c-${kind}`;
      return entry;
    });
    return make("div", shown, "kinds");
  }
  const { low, high, ticks } = MODES[name];
  const bars = Array.from({ length: LEVELS + 1 }, (_, n) => make("i", "", `l${n}`));
  const labels = ticks.map(([at, text]) => {
    const label = make("b", text, at === "first" || at === "last" ? at : "");
    const share = Math.log(at / low) / Math.log(high / low);
    const place = at === "first" ? 0 : at === "last" ? 1 : (1 + share * LEVELS) / (LEVELS + 1);
    label.style.left = `${100 * place}%`;
    return label;
  });
  return make("div", [...bars, ...labels], "ramp");
}

/** An element with text (never HTML: what a model writes must stay text) or with children. */
function make(tag, content = "", className = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...(Array.isArray(content) ? content : [content]));
  return element;
}
