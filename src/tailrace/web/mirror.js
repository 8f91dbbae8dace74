"use strict";
const PHASES = { plan: "--dim", read: "--blue", write: "--green", schedule: "--violet", commit: "--amber", maintain: "--red" };
const none = (columns, text) => make("tr", make("td", text, { class: "dim", colspan: columns }));
function draw(all) {
  const m = all.mirror, rounds = all.rounds, last = rounds.at(-1), tables = last ? last.tables : [];
  const problems = [];
  if (m.trouble) problems.push(`Not in step with all of the bucket, and the mirror keeps trying: ${m.message}.`);
  if (m.lag_s > 300) problems.push(`The table is ${seconds(m.lag_s)} behind the bucket.`);
  if (all.verify && !all.verify.equal) problems.push(`The last verify found ${many(all.verify.differences, "difference")}.`);
  const back = all.events.filter(e => e.event === "rollback");
  const told = back.length ? `The bucket took back changes ${back.length === 1 ? "once" : back.length + " times"}, and the table followed: ${many(m.rows_rolled_back, "row")} ${m.rows_rolled_back === 1 ? "was" : "were"} undone. ` : "";
  const proved = back.length && all.verify && all.verify.equal && all.verify.time > back.at(-1).time;
  if (told && !proved) problems.push(`${told}Run 'tailrace verify' to prove that they agree.`);
  const begun = last || m.message === "waiting for changes";
  verdict(problems, begun ? `In step: ${many(m.lag_changes, "change")} behind, ${seconds(m.lag_s)} old. ${proved ? told + "Verify has since found them equal." : ""}` : `Nothing is committed yet: ${m.message}.`, !begun);
  show("head", `bucket ${m.bucket}, table ${m.table}, version ${count(m.version)}; ${m.message}`);
  show("tiles", tile("changes behind", m.lag_changes === null ? "unknown" : count(m.lag_changes)), tile("age of the table", seconds(m.lag_s), m.lag_s > 300), tile("changes applied", count(m.changes)), tile("rows written", count(m.rows_written)), tile("rows masked", count(m.rows_masked)), tile("bytes written", bytes(m.bytes_written)),
    tile("vbuckets rolled back", count(m.rollbacks), m.rollbacks), tile("rows undone", count(m.rows_rolled_back), m.rows_rolled_back), tile("compactions", count(m.compactions)), tile("problems", count(m.troubles), m.troubles));
  const marks = all.events.filter(e => e.event !== "compaction").map(e => ({ t: e.time, text: `${e.event}: ${e.text}` }));
  if (past.time.length) {
    chart("lag", "Age of the table", [{ name: "", colour: "--blue", points: line("lag_s") }], marks, seconds);
    chart("behind", "Changes behind", [{ name: "", colour: "--violet", points: line("lag_changes") }], marks, count);
    chart("phases", "Longest rounds by phase", Object.entries(PHASES).map(([name, colour]) => ({ name, colour, points: line(name) })), marks, seconds);
    chart("undo", "Undo depth", [{ name: "", colour: "--green", points: line("undo_s") }], marks, seconds);
  }
  const of_tables = tables.map(t => make("tr", [make("td", t.table), make("td", count(t.files), { class: "n" }), make("td", count(t.masked_rows), { class: "n" }), make("td", count(t.undo_versions), { class: "n" }), make("td", seconds(t.undo_s), { class: "n" })]));
  show("tables", ...(of_tables.length ? of_tables : [none(5, "known after the first round")]));
  const rows = [...back].reverse().map(e => make("tr", [make("td", clock(e.time)), make("td", count(e.vbuckets.length), { class: "n" }), make("td", count(e.changes), { class: "n" }), make("td", count(e.rows), { class: "n" }), make("td", `${count(e.version_before)} → ${count(e.version)}`),
    make("td", Object.entries(e.from_to).map(([vb, [from, to]]) => `${vb}: ${count(from)} → ${count(to)}`).join(", ") + (e.vbuckets.length > Object.keys(e.from_to).length ? ", …" : ""))]));
  show("rollbacks", ...(rows.length ? rows : [none(6, "none")]));
  if (all.verify) {
    const v = all.verify, behind = v.behind ? `, ${count(v.behind)} changes behind` : "";
    show("verify", make("span", v.equal ? "equal" : `${count(v.differences)} differences`, { class: v.equal ? "good" : "bad" }), ` on ${new Date(v.time * 1000).toLocaleString()}: ${count(v.documents)} documents in the bucket, ${count(v.rows)} rows in the table at version ${count(v.table_version)}${behind}`);
    $("verify").className = "";
  }
  events("events", all.events);
}
every(2000, "api/stats", draw);
