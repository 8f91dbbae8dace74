"use strict";
/* What the pages share: words for figures, a line chart with marked events, and one request at a time.
   Names and texts come from peers: they only ever become text, never markup. */
const $ = id => document.getElementById(id);
const count = n => Math.round(Number(n)).toLocaleString("en");
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) { n /= 1024; at++; }
  return (at ? n.toFixed(1) : Math.round(n)) + " " + units[at];
}
function seconds(s) {
  if (s < 1) return Math.round(s * 1000) + " ms";
  if (s < 90) return s.toFixed(1) + " s";
  if (s < 5400) return Math.round(s / 60) + " min";
  return s < 172800 ? (s / 3600).toFixed(1) + " h" : Math.round(s / 86400) + " days";
}
const clock = t => new Date(t * 1000).toLocaleTimeString();
function make(tag, content, attributes = {}) {
  const made = document.createElement(tag);
  if (content !== undefined) made.append(...[].concat(content));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
const tile = (name, value, bad) => make("div", [make("b", value, bad ? { class: "bad" } : {}), make("span", name, { class: "dim" })], { class: "tile" });
const show = (id, ...children) => $(id).replaceChildren(...children);
function verdict(problems, fine) {
  const box = $("verdict");
  box.className = problems.length ? "bad" : "";
  box.textContent = problems.length ? problems.join(" ") : fine;
}
const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
/* A chart of lines over time: series are {name, colour, points: [[t, value], ...]}, marks are {t, text}. */
function chart(id, title, series, marks, format) {
  const W = 300, H = 80, all = series.flatMap(s => s.points);
  const t1 = Math.max(...all.map(p => p[0]), 1), t0 = Math.min(...all.map(p => p[0]), t1 - 1);
  const top = Math.max(...all.map(p => p[1]), 1e-9);
  const x = t => (t - t0) / Math.max(1e-9, t1 - t0) * W, y = v => H - v / top * H;
  const drawing = svg("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  drawing.append(svg("line", { x1: 0, x2: W, y1: H, y2: H, stroke: "currentColor", "stroke-opacity": .3, "vector-effect": "non-scaling-stroke" }));
  for (const s of series) {
    const d = s.points.map((p, at) => `${at ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    drawing.append(svg("path", { d, fill: "none", stroke: s.colour, "stroke-width": 2, "vector-effect": "non-scaling-stroke" }));
  }
  for (const m of marks.filter(m => m.t >= t0 && m.t <= t1)) {
    const line = svg("line", { x1: x(m.t), x2: x(m.t), y1: 0, y2: H, stroke: "var(--red)", "stroke-width": 2, "stroke-dasharray": "4 3", "vector-effect": "non-scaling-stroke", class: "mark" });
    const text = svg("title", {});
    text.textContent = `${clock(m.t)} ${m.text}`;
    line.append(text);
    drawing.append(line);
  }
  const now = series.map(s => `${s.name ? s.name + " " : ""}${s.points.length ? format(s.points.at(-1)[1]) : "-"}`).join(", ");
  show(id, make("figcaption", [make("b", title), make("span", `${now} · most ${format(all.length ? top : 0)}`, { class: "dim" })]), drawing);
}
function events(id, list) {
  const rows = [...list].reverse().map(e => make("li", [make("span", clock(e.time) + " ", { class: "dim" }), make("span", e.text.startsWith(e.event) ? e.text : `${e.event}: ${e.text}`)], { "data-event": e.event }));
  show(id, ...(rows.length ? rows : [make("li", "nothing has happened", { class: "dim" })]));
}
async function every(ms, path, draw) {
  for (;;) {
    try {
      const answer = await fetch(path);
      if (!answer.ok) throw new Error(`${answer.status} ${(await answer.json()).error || ""}`);
      draw(await answer.json());
    } catch (error) {
      verdict([`It does not answer: ${error.message}`], "");
    }
    await new Promise(done => setTimeout(done, document.hidden ? 5 * ms : ms));
  }
}
