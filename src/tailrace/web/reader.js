"use strict";
const points = { lag: [], changes: [] };
let before = null;
function draw(r) {
  if (r.changes === undefined) { verdict([], "It is not connected yet."); return; }
  const now = Date.now() / 1000;
  if (before) points.changes.push([now, Math.max(0, r.changes - before.changes) / (now - before.at)]);
  before = { at: now, changes: r.changes };
  if (r.lag_changes !== undefined) points.lag.push([now, r.lag_changes]);
  for (const list of Object.values(points)) if (list.length > 300) list.shift();
  const away = Object.entries(r.nodes).filter(([, node]) => node.state !== "open");
  verdict(away.map(([address, node]) => `${address}: ${node.state}.`), `It waits for ${r.waits_for}.`);
  show("head", `${r.command} of bucket ${r.bucket}, called ${r.name}`);
  show("tiles", tile("changes read", count(r.changes)), tile("changes behind", r.lag_changes === undefined ? "unknown" : count(r.lag_changes)), tile("behind for", r.lag_s === undefined ? "unknown" : seconds(r.lag_s), r.lag_s > 300), tile("rollbacks", count(r.rollbacks), r.rollbacks), tile("lost connections", count(r.lost_connections)), tile("received", bytes(r.received_bytes)), tile("waits for the application", bytes(r.queued_bytes)));
  chart("lag", "Changes behind", [{ name: "", colour: "--violet", points: points.lag }], [], count);
  chart("rate", "Changes a second", [{ name: "", colour: "--blue", points: points.changes }], [], count);
}
every(2000, "api/stats", draw);
