"use strict";
function draw(r) {
  if (r.changes === undefined) { verdict([], "It is not connected yet."); return; }
  const away = Object.entries(r.nodes).filter(([, node]) => node.state !== "open");
  const problems = away.map(([address, node]) => `${address}: ${node.state}.`);
  if (r.lag_s > 300) problems.push(`It is ${seconds(r.lag_s)} behind the bucket.`);
  const waits = r.waits_for.startsWith("waits") ? `It ${r.waits_for}.` : `It waits for ${r.waits_for}.`;
  verdict(problems, r.lag_changes === 0 ? `In step with the bucket. ${waits}` : waits);
  show("head", `${r.command} of bucket ${r.bucket}, called ${r.name}`);
  show("tiles", tile("changes read", count(r.changes)), tile("changes behind", r.lag_changes === undefined ? "unknown" : count(r.lag_changes)), tile("behind for", r.lag_s === undefined ? "unknown" : seconds(r.lag_s), r.lag_s > 300), tile("rollbacks", count(r.rollbacks), r.rollbacks), tile("changes taken back", count(r.rolled_back_changes), r.rolled_back_changes), tile("lost connections", count(r.lost_connections)), tile("received", bytes(r.received_bytes)), tile("waits for the application", bytes(r.queued_bytes)));
  if (past.time.length) {
    chart("lag", "Changes behind", [{ name: "", colour: "--violet", points: line("lag_changes") }], [], count);
    chart("rate", "Changes a second", [{ name: "", colour: "--blue", points: rate("changes") }], [], count);
  }
}
every(2000, "api/stats", draw);
