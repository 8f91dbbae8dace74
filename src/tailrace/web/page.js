"use strict";
/* What the pages share: words for figures, line charts with marked events, and one request at a time.
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
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 150, charts = {};
/* A chart of lines over time, drawn by uPlot (see uPlot-license.txt). Series are {name, colour, points: [[t, value], ...]} with
   the same times, marks are {t, text}. What it says is also in the caption, for whoever can't see or point at lines. */
function chart(id, title, series, marks, format) {
  const all = series.flatMap(s => s.points), figure = $(id);
  const last = s => `${s.name ? s.name + " " : ""}${s.points.length ? format(s.points.at(-1)[1]) : "-"}`;
  const said = `${series.map(last).join(", ")} · most ${format(Math.max(0, ...all.map(p => p[1])))}`;
  const caption = make("figcaption", [make("b", title), make("span", said, { class: "dim" })]);
  const marked = marks.map(m => `${clock(m.t)} ${m.text}`).join("; ");
  if (figure.firstElementChild) figure.firstElementChild.replaceWith(caption);
  else figure.append(caption, make("div", undefined, { class: "plot" }));
  figure.lastElementChild.setAttribute("role", "img");
  figure.lastElementChild.setAttribute("aria-label", `${title}: ${said}${marked ? "; marked: " + marked : ""}`);
  if (!window.uPlot) return;
  const data = [series[0].points.map(p => p[0]), ...series.map(s => s.points.map(p => p[1]))];
  if (!charts[id]) charts[id] = drawn(figure.lastElementChild, title, series, format);
  charts[id].marks = marks;
  charts[id].setData(data);
}
function drawn(place, title, series, format) {
  const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const plot = new uPlot({
    width: place.clientWidth, height: HEIGHT, legend: { show: series.length > 1 }, cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [{ ...axis, space: 90 }, { ...axis, size: 62, space: 35, values: (_, values) => values.map(v => v === null ? "" : format(v)) }],
    series: [{}, ...series.map(s => ({ label: s.name || title, stroke: () => colour(s.colour), width: 2, points: { show: false }, value: (_, v) => v === null || v === undefined ? "-" : format(v) }))],
    hooks: { draw: [u => place_marks(u)] },
  }, undefined, place);
  new ResizeObserver(() => { if (place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: HEIGHT }); }).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  return plot;
}
function place_marks(u) {
  const { min, max } = u.scales.x;
  for (const old of u.over.querySelectorAll(".mark")) old.remove();
  for (const m of (u.marks || []).filter(m => m.t >= min && m.t <= max)) {
    const line = make("i", undefined, { class: "mark", title: `${clock(m.t)} ${m.text}` });
    line.style.left = `${u.valToPos(m.t, "x")}px`;
    u.over.append(line);
  }
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
