"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { layers, heads, groups, tokens } = data;
  const n = tokens.length, perGroup = heads / groups;
  const byId = (id) => document.getElementById(id);

  const words16 = (text) => // little-endian, as typed arrays are in browsers
    new Uint16Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  const half = (bits) => { // IEEE float16 that is not negative
    const exponent = bits >> 10, fraction = bits & 1023;
    return exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : fraction * 2 ** -24;
  };
  const scores = words16(data.scores); // [layers, heads, n]
  const evicted = words16(data.evicted_at); // [layers, groups, n]

  /* The selection. head is "all", "kv 1" or "query 4" of the layer. */
  const state = { layer: 0, head: "all", at: n - 1, token: 0 };
  const queryHeads = () => { // [first, end]
    const [kind, text] = state.head.split(" "), number = +text;
    if (kind === "all") return [0, heads];
    return kind === "kv" ? [number * perGroup, (number + 1) * perGroup] : [number, number + 1];
  };

  const place = byId("words"), spans = [...place.children];
  /* For each key of the selection, its score, and the first token for which no head's cache holds
     it any more. */
  let now = null, left = null, total = 1;
  const short = (x) => Number(x.toPrecision(4)).toString();
  const visible = (text) => text.trim() ? text.trim() : JSON.stringify(text).slice(1, -1);
  const label = (j) => data.labels[j] ?? visible(tokens[j]);
  const until = (j) => left[j] >= n ? "the end" : `token ${left[j] - 1}`;

  const shade = () => {
    const sorted = Float64Array.from(now).sort();
    const high = sorted[n - 1];
    let middle = (sorted[(n - 1) >> 1] + sorted[n >> 1]) / 2;
    if (!(middle > 0)) middle = high / n;
    spans.forEach((span, j) => {
      const x = high > middle ? Math.log(Math.max(now[j], middle) / middle) / Math.log(high / middle) : 0;
      span.style.background = x >= 0.005 ? `rgb(var(--mark) / ${x.toFixed(2)})` : "";
      span.title = `${j}: ${short(now[j])}`;
    });
    const order = Array.from(now.keys()).sort((a, b) => now[b] - now[a] || a - b).slice(0, 20);
    const rows = order.map((j) => {
      const row = document.createElement("tr");
      for (const text of [j, label(j), short(now[j]), `${(100 * now[j] / total).toFixed(1)}%`, until(j)]) {
        const cell = document.createElement("td");
        cell.textContent = text;
        row.append(cell);
      }
      if (!tokens[j].trim() && !(j in data.labels)) row.children[1].className = "blank";
      return row;
    });
    document.querySelector("#best tbody").replaceChildren(...rows);
  };
  const mark = () => {
    let held = 0;
    spans.forEach((span, j) => {
      const later = j > state.at, gone = !later && left[j] <= state.at;
      held += !later && !gone;
      span.className = (later ? "later" : gone ? "gone" : "") + (j === state.token ? " chosen" : "");
    });
    byId("at-value").textContent = state.at;
    const j = state.token;
    const view = state.head === "all" ? "all heads" : state.head.replace("kv", "key/value head").replace("query", "query head");
    byId("status").textContent =
      `Layer ${layers[state.layer]}, ${view}: token ${state.at} sees ${held} of ${state.at + 1} keys` +
      (state.head === "all" ? " in some head" : "") +
      `. Token ${j}, “${label(j)}”, has received ${short(now[j])} (${(100 * now[j] / total).toFixed(2)}% of all attention) and is held until ${until(j)}.`;
  };
  const all = () => {
    now = new Float64Array(n);
    left = new Uint16Array(n);
    for (let [h, end] = queryHeads(); h < end; h++) {
      const ofHead = (state.layer * heads + h) * n;
      const ofGroup = (state.layer * groups + Math.floor(h / perGroup)) * n;
      for (let j = 0; j < n; j++) {
        now[j] += half(scores[ofHead + j]);
        left[j] = Math.max(left[j], evicted[ofGroup + j]);
      }
    }
    total = now.reduce((a, b) => a + b, 0) || 1;
    shade();
    mark();
  };

  byId("layer").addEventListener("change", (e) => { state.layer = +e.target.value; all(); });
  byId("head").addEventListener("change", (e) => { state.head = e.target.value; all(); });
  byId("at").addEventListener("input", (e) => { state.at = +e.target.value; mark(); });
  byId("token").addEventListener("input", (e) => {
    const j = Math.round(+e.target.value);
    if (e.target.value !== "" && j >= 0 && j < n) { state.token = j; mark(); }
  });
  place.addEventListener("click", (e) => {
    const j = spans.indexOf(e.target);
    if (j >= 0) { state.token = j; byId("token").value = j; mark(); }
  });
  all();
})();
