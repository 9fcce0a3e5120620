// The numbers of one token, next to it.

const tip = document.getElementById("tip");

/** Four digits, so that 0.9995 and 0.9993 differ; a plus sign only if `sign` is set. */
function number(value, { sign = false, digits = 4 } = {}) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text =
    size === 0 ? "0" : size < 1e-4 || size >= 1e6 ? size.toExponential(digits - 1) : String(+size.toPrecision(digits));
  return (value < 0 ? "-" : sign && value > 0 ? "+" : "") + text;
}

const percent = (share, digits = 3) => (share === null ? "–" : `${+(100 * share).toPrecision(digits)}%`);

function repr(text) {
  return JSON.stringify(text).replace(INVISIBLE, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** A token's text; if it has none, the character that it is a part of, if a later token completes one. */
function tokenText(t, i) {
  if (t.text[i] !== "") return repr(t.text[i]);
  const span = response.querySelector(`[data-i="${i}"]`);
  const whole = span && span.closest(".join");
  return whole ? `"" (part of ${repr(t.text[+whole.lastElementChild.dataset.i])})` : `""`;
}

function inTheLoss(t, i) {
  return {
    tool: "no: not the model's token",
    dropped: "no: dropped by the correction (weight 0)",
    filtered: "no: taken out of the mask, by a filter or verl's rejection",
    kept: "yes",
  }[kind(t, i)];
}

function tipRows(t, i) {
  const withLog = (l) => (l === null ? "–" : `${number(Math.exp(l))} (log ${number(l)})`);
  const own = t.generated[i] === "1";
  const gap = logK(t, i);
  return [
    ["Position", position(t, i).toLocaleString("en")],
    ["Token", tokenText(t, i)],
    ["id", String(t.id[i])],
    ...(own
      ? [
          ["p rollout", withLog(t.l_infer[i])],
          ["p training", withLog(t.l_old[i])],
          ["log k", number(gap, { sign: true })],
          ["k", number(Math.exp(gap))],
          ...(t.weight ? [["Weight", number(t.weight[i])]] : []),
        ]
      : []),
    ["In the loss", inTheLoss(t, i)],
    ...(own && t.agreement ? [["Agreement", percent(t.agreement[i], 4)]] : []),
    ...(own && t.entropy ? [["Entropy", number(t.entropy[i])]] : []),
  ];
}

/** Shows the numbers below the token, or above it if there is no room; never over it. */
function showTip(t, span, pinned) {
  tip.hidden = false;
  tip.classList.toggle("pinned", pinned);
  const rows = tipRows(t, +span.dataset.i).flatMap(([name, value]) => [
    make("dt", name),
    make("dd", value, name === "Token" ? "repr" : ""),
  ]);
  tip.replaceChildren(make("dl", rows));
  const boxes = span.getClientRects(); // a token that wraps has several
  const [first, last] = [boxes[0], boxes[boxes.length - 1]];
  const { width, height } = tip.getBoundingClientRect();
  const below = last.bottom + 8 + height <= innerHeight;
  tip.style.left = `${Math.max(8, Math.min((below ? last : first).left, innerWidth - width - 8))}px`;
  tip.style.top = `${below ? last.bottom + 8 : Math.max(8, first.top - 8 - height)}px`;
}

function hideTip() {
  tip.hidden = true;
}
