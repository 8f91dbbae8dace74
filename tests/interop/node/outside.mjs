// What the official Node.js SDK does on a cluster behind names: node outside.mjs CLUSTER_NAME DNS_PORT CA_FILE
// It writes, says so, and waits for a line before it goes on, so that the nodes can change meanwhile.

import assert from 'node:assert'
import { once } from 'node:events'
import couchbase from 'couchbase'

const [name, dnsPort, caFile] = process.argv.slice(2)
const keys = Array.from({ length: 60 }, (_, number) => `key::${number}`)

const cluster = await couchbase.connect(`couchbases://${name}`, {
  username: 'Administrator',
  password: 'password',
  security: { trustStorePath: caFile },
  dnsConfig: { nameserver: '127.0.0.1', port: Number(dnsPort), dnsSrvTimeout: 5000 },
  timeouts: { kvTimeout: 30000, bootstrapTimeout: 60000, connectTimeout: 60000 },
})
const collection = cluster.bucket('default').defaultCollection()
const content = async (key) => (await collection.get(key)).content

for (const key of keys) await collection.upsert(key, { round: 'before' })
for (const key of keys) assert.deepEqual(await content(key), { round: 'before' })
assert.deepEqual((await collection.getAnyReplica(keys[1])).content, { round: 'before' })
const scanned = await collection.scan(new couchbase.PrefixScan('key::'))
assert.deepEqual(scanned.map((document) => document.id).sort(), [...keys].sort())
console.log('before')
await once(process.stdin, 'data')
for (const key of keys) {
  assert.deepEqual(await content(key), { round: 'before' })
  await collection.upsert(key, { round: 'after' })
}
for (const key of keys) assert.deepEqual(await content(key), { round: 'after' })
console.log('after')
await cluster.close()
process.exit(0)
