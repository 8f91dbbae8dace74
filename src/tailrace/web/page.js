"use strict";
/* What the pages share: formatting of figures, line charts of the last hour with marked events, and one request at a time.
   Names and texts come from peers: they only ever become text, never markup. */
const $ = id => document.getElementById(id);
function count(n) { return Math.round(Number(n)).toLocaleString("en"); }
function many(n, thing) { return `${count(n)} ${thing}${n === 1 ? "" : "s"}`; }
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
const time_of = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
function clock(t) {
  const day = new Date(t * 1000), words = day.toLocaleTimeString([], time_of);
  return day.toDateString() === new Date().toDateString() ? words : `${day.toLocaleDateString()} ${words}`;
}
function make(tag, content, attributes = {}) {
  const made = document.createElement(tag);
  if (content !== undefined) made.append(...[].concat(content));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
const tile = (name, value, bad) => make("div", [make("b", value, bad ? { class: "bad" } : {}), make("span", name, { class: "dim" })], { class: "tile" });
/* Replaces the content of an element, but keeps the focus and the scroll position. */
function show(id, ...children) {
  const place = $(id), top = place.scrollTop, held = place.contains(document.activeElement) && document.activeElement.getAttribute("aria-label");
  place.replaceChildren(...children);
  place.scrollTop = top;
  const same = held && place.querySelector(`[aria-label="${CSS.escape(held)}"]`);
  if (same) same.focus({ preventScroll: true });
}
function verdict(problems, fine, waits) {
  const box = $("verdict");
  box.className = problems.length ? "bad" : waits ? "waits" : "";
  box.textContent = problems.length ? problems.join(" ") : fine;
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/* Samples from before and after the page was opened. A counter that has become smaller belongs to a new process. */
const past = { time: [] }, KEPT_S = 3600;
let now = 0, began = 0, asked = 0;
async function lookBack() {
  if (Date.now() - asked < 4500) return;
  asked = Date.now();
  const answer = await fetch(`api/past?since=${past.time.at(-1) || 0}`);
  if (!answer.ok) return;
  const more = await answer.json();
  now = more.now;
  began = began || more.began;
  for (const [name, values] of Object.entries(more.samples)) past[name] = [...(past[name] || []), ...values];
  const old = past.time.findIndex(t => t > now - KEPT_S);
  if (old > 0) for (const values of Object.values(past)) values.splice(0, old);
}
const line = name => past.time.map((t, at) => [t, past[name][at]]);
const rate = name => line(name).map(([t, value], at, all) => {
  if (!at || value === null || all[at - 1][1] === null || value < all[at - 1][1]) return [t, null];
  return [t, (value - all[at - 1][1]) / (t - all[at - 1][0])];
}).slice(1);
const HEIGHT = 150, charts = {};
/* Steps of the axis for each format, so that no axis says "1, 1, 0". */
const steps = {
  count: [1, 2, 5].flatMap(n => [...Array(13)].map((_, power) => n * 10 ** power)).sort((a, b) => a - b),
  bytes: [...Array(50)].map((_, power) => 2 ** power),
  seconds: [.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 43200, 86400, 172800, 604800],
};
/* A chart of lines over time, drawn by uPlot (see uPlot-license.txt). Series are {name, colour, points: [[t, value], ...]} with
   the same times, marks are {t, text}. The caption has the newest figures, or those under the pointer; the label has them for
   people who can't see the lines. */
function chart(id, title, series, marks, format) {
  const from = Math.max(now - $("span").value, began), figure = $(id);
  series = series.map(s => ({ ...s, points: s.points.filter(p => p[0] >= from) }));
  const all = series.flatMap(s => s.points.map(p => p[1])).filter(value => value !== null), most = Math.max(0, ...all);
  if (!figure.firstElementChild) figure.append(make("figcaption", [make("b", title), make("span", "", { class: "dim" })]), make("div", undefined, { class: "plot", role: "img" }));
  const [caption, place] = figure.children;
  const value = (s, at) => s.points.length && s.points.at(at)[1] !== null ? format(s.points.at(at)[1]) : "-";
  const words = at => series.map(s => `${s.name ? s.name + " " : ""}${value(s, at)}`).join(", ");
  const tell = at => {
    const figures = series.flatMap(s => [make("span", [s.name ? make("i", undefined, { class: "swatch", style: `background: var(${s.colour})` }) : "", `${s.name ? s.name + " " : ""}${value(s, at ?? -1)}`], { class: "figure" }), " "]);
    caption.lastElementChild.replaceChildren(...figures, at === undefined ? `· most ${format(most)}` : `· at ${clock(series[0].points[at][0])}`);
  };
  const marked = marks.map(m => `${clock(m.t)} ${m.text}`).join("; ");
  place.setAttribute("aria-label", `${title}: ${words(-1)} · most ${format(most)}${marked ? "; marked: " + marked : ""}`);
  if (window.uPlot && !charts[id]) charts[id] = drawn(place, series, format);
  const plot = charts[id];
  if (!plot) { tell(); return; }
  Object.assign(plot, { marks, from, tell });
  plot.setData([series[0].points.map(p => p[0]), ...series.map(s => s.points.map(p => p[1]))]);
  point(plot);
}
function point(plot) {
  const { left, idx } = plot.cursor;
  plot.tell(left >= 0 && idx !== null && idx < plot.data[0].length ? idx : undefined);
}
function drawn(place, series, format) {
  const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const time = (u, values) => values.map(t => new Date(t * 1000).toLocaleTimeString([], { ...time_of, second: now - u.from > 600 ? undefined : "2-digit" }));
  const plot = new uPlot({
    width: place.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { drag: { x: false, y: false } },
    scales: { x: { range: u => [u.from || 0, Math.max(now, (u.from || 0) + 1)] }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [{ ...axis, space: 110, size: 30, values: time }, { ...axis, size: 66, space: 35, incrs: steps[format.name], values: (_, values) => values.map(v => v === null ? "" : format(v)) }],
    series: [{}, ...series.map(s => ({ stroke: () => colour(s.colour), width: 2, points: { show: false } }))],
    hooks: { draw: [u => place_marks(u)], setCursor: [u => { if (u.tell) point(u); }] },
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
  let last;
  $("span").addEventListener("change", () => { if (last) draw(last); });
  for (;;) {
    try {
      const [answer] = await Promise.all([fetch(path), lookBack()]);
      if (!answer.ok) throw new Error(`${answer.status} ${(await answer.json()).error || ""}`);
      last = await answer.json();
      draw(last);
    } catch (error) {
      verdict([`No answer: ${error.message}. The figures below are the last known.`], "");
    }
    await new Promise(done => setTimeout(done, document.hidden ? 5 * ms : ms));
  }
}
