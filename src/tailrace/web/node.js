"use strict";
let chosen = null;
function bucketSection(name, b) {
  const late = new Set(b.unpersisted);
  const cells = [...b.states].map((s, id) => make("i", undefined, { class: late.has(id) && s === "a" ? "u" : s, "data-vbucket": id, title: `vbucket ${id}` }));
  const map = make("div", cells, { class: "map", "data-bucket": name, role: "img", "aria-label": `${b.states.length} vbuckets of ${name} by state` });
  map.addEventListener("click", event => { const id = event.target.dataset.vbucket; if (id !== undefined) inspect(name, id); });
  return make("section", [
    make("h2", `Bucket ${name}`),
    make("div", [tile("documents", count(b.documents)), tile("not on disk yet", count(b.queued)), tile(`memory of ${bytes(b.quota_bytes)}`, bytes(b.memory_bytes), b.back_pressure), tile("disk", bytes(b.disk_bytes)), tile("failovers since the start", count(b.failovers), b.failovers), tile("changes lost by them", count(b.lost_changes), b.lost_changes)], { class: "tiles" }),
    map]);
}
function inspect(bucket, id) {
  chosen = [bucket, id];
  const field = document.forms.rewind.elements.vbucket;
  if (field) field.value = id;
  return history_of(bucket, id);
}
async function history_of(bucket, id) {
  const answer = await fetch(`api/vbucket?bucket=${encodeURIComponent(bucket)}&vbucket=${encodeURIComponent(id)}`);
  const v = await answer.json();
  if (v.error) { show("vbucket", make("p", v.error, { class: "bad" })); return; }
  let tree = null;
  for (const branch of v.branches) {
    const line = make("li", `${branch.vb_uuid}: seqno ${count(branch.begins)} to ${count(branch.ends)}`);
    if (tree) line.append(tree);
    tree = make("ul", line, { class: "tree" });
  }
  show("vbucket", make("p", `vbucket ${v.vbucket} of ${bucket} is ${v.state}: ${count(v.documents)} documents, high seqno ${count(v.high_seqno)}, on disk ${count(v.persisted_seqno)}, purged up to ${count(v.purge_seqno)}`),
    make("p", "Branches of its history, the oldest first; each begins where the one before was left:"), tree || "");
}
function draw(view) {
  const n = view.node, names = Object.keys(view.buckets);
  const problems = [];
  if (!n.ready) problems.push("The node waits for its cluster map and serves nothing.");
  for (const [name, b] of Object.entries(view.buckets)) {
    if (b.flush_fails) problems.push(`Bucket ${name} can't be written to disk: changes stay in memory. The reason is below.`);
    else if (b.maintenance_fails) problems.push(`Files of bucket ${name} can't be sealed or merged: memory and disk fill up. The reason is below.`);
    if (b.back_pressure) problems.push(`Bucket ${name} refuses writes: the disk is behind.`);
    if (b.lost_changes) problems.push(`Bucket ${name} has lost ${many(b.lost_changes, "change")} in ${many(b.failovers, "failover")} of vbuckets.`);
  }
  const slow = view.streams.filter(s => s.why.includes("slow"));
  if (slow.length) problems.push(`${many(slow.length, "stream")} held up by the reader.`);
  if (n.disk_used > .9) problems.push(`The disk is ${Math.round(n.disk_used * 100)} % full.`);
  verdict(problems, "All is well.");
  show("head", `Tailrace ${n.version}, up for ${seconds(n.uptime_s)}`);
  show("tiles", tile("connections", count(n.connections)), tile("streams", count(view.streams.length)), tile("logins refused", count(n.logins_refused), n.logins_refused), tile("received", bytes(n.received_bytes)), tile("sent", bytes(n.sent_bytes)), tile("disk used", Math.round(n.disk_used * 100) + " %"));
  const marks = view.events.filter(e => ["failover", "rollback", "fault", "flush_failed", "maintenance_failed"].includes(e.event)).map(e => ({ t: e.time, text: e.text }));
  if (past.time.length) {
    chart("rate", "Writes and reads a second", [{ name: "writes", colour: "--blue", points: rate("writes") }, { name: "reads", colour: "--green", points: rate("reads") }], marks, count);
    chart("sent", "Sent a second", [{ name: "", colour: "--violet", points: rate("sent_bytes") }], marks, bytes);
    chart("queued", "Changes not on disk yet", [{ name: "", colour: "--amber", points: line("queued") }], marks, count);
  }
  show("buckets", ...names.map(name => bucketSection(name, view.buckets[name])));
  if (chosen) history_of(...chosen).catch(() => undefined);
  if (chosen) for (const cell of document.querySelectorAll(`.map i[data-vbucket="${chosen[1]}"]`)) if (cell.parentElement.dataset.bucket === chosen[0]) cell.classList.add("chosen");
  const streams = view.streams.sort((a, b) => b.lag_changes - a.lag_changes).map(s => make("tr", [
    make("td", s.name || s.peer), make("td", s.dialect), make("td", s.role), make("td", s.bucket), make("td", count(s.streams), { class: "n" }), make("td", count(s.lag_changes), { class: "n" }),
    make("td", s.window_bytes ? `${bytes(s.unacknowledged_bytes)} of ${bytes(s.window_bytes)}` : "none", { class: "n" }), make("td", s.why, s.why.includes("slow") ? { class: "bad" } : {}),
    make("td", n.has_faults ? killer(s.name) : "")]));
  show("streams", ...(streams.length ? streams : [make("tr", make("td", "none", { class: "dim", colspan: 9 }))]));
  events("events", view.events);
  $("actions").hidden = !n.has_faults;
}
function killer(name) {
  const button = make("button", "break", { type: "button", "aria-label": `break the connection of ${name}` });
  button.addEventListener("click", () => fault("drop", { name }));
  return button;
}
async function fault(kind, fields) {
  const token = document.forms.rewind.elements.token.value;
  const answer = await fetch(`faults/${kind}`, { method: "POST", headers: { Authorization: `Bearer ${token}` }, body: JSON.stringify(fields) });
  const said = await answer.json();
  show("done", answer.ok ? `${kind}: done` : said.error);
}
document.forms.rewind.addEventListener("submit", event => {
  event.preventDefault();
  const f = event.target.elements;
  const kind = event.submitter && event.submitter.value === "failover" ? "failover" : "rewind";
  fault(kind, { vbucket: f.vbucket.value, lose: f.lose.value });
});
document.forms.look.addEventListener("submit", event => {
  event.preventDefault();
  const map = document.querySelector(".map");
  if (map) inspect(event.target.elements.bucket.value || map.dataset.bucket, event.target.elements.number.value);
});
every(2000, "api/view", draw);
