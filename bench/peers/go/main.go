// Reads a bucket with gocbcore whenever it is asked to, and reports how long that took.
//
// Arguments: HOST:PORT BUCKET USER PASSWORD CA-FILE|- snappy|plain. A line on stdin asks for a reading,
// "read DOCUMENTS" or "check DOCUMENTS"; a line of JSON on stdout is the answer.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/couchbase/gocbcore/v10"
	"github.com/couchbase/gocbcore/v10/memd"
)

const patience = time.Minute

func die(what string, err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, what, err)
		os.Exit(1)
	}
}

type answer struct {
	Documents  uint64  `json:"documents"`
	ValueBytes uint64  `json:"value_bytes"`
	Seqnos     uint64  `json:"seqnos"`
	Cas        uint64  `json:"cas"`
	Contents   uint64  `json:"contents"`
	Seconds    float64 `json:"seconds"`
	FirstS     float64 `json:"first_s"`
	CPUS       float64 `json:"cpu_s"`
	PeakKib    int64   `json:"peak_kib"`
}

// One reading. The bucket is on one node and its messages come from one goroutine, so nothing is locked.
type reading struct {
	answer
	wanted uint64
	check  bool
	began  time.Time
	done   chan struct{}
}

func (r *reading) Mutation(mutation gocbcore.DcpMutation) {
	if r.Documents == 0 {
		r.FirstS = time.Since(r.began).Seconds()
	}
	r.ValueBytes += uint64(len(mutation.Value))
	r.Seqnos += mutation.SeqNo
	r.Cas ^= mutation.Cas
	if r.check {
		r.Contents += uint64(crc32.Update(crc32.ChecksumIEEE(mutation.Key), crc32.IEEETable, mutation.Value))
	}
	r.Documents++
	if r.Documents == r.wanted {
		r.Seconds = time.Since(r.began).Seconds()
		close(r.done)
	}
}

func (r *reading) SnapshotMarker(gocbcore.DcpSnapshotMarker)           {}
func (r *reading) Deletion(gocbcore.DcpDeletion)                       {}
func (r *reading) Expiration(gocbcore.DcpExpiration)                   {}
func (r *reading) End(gocbcore.DcpStreamEnd, error)                    {}
func (r *reading) CreateCollection(gocbcore.DcpCollectionCreation)     {}
func (r *reading) DeleteCollection(gocbcore.DcpCollectionDeletion)     {}
func (r *reading) FlushCollection(gocbcore.DcpCollectionFlush)         {}
func (r *reading) CreateScope(gocbcore.DcpScopeCreation)               {}
func (r *reading) DeleteScope(gocbcore.DcpScopeDeletion)               {}
func (r *reading) ModifyCollection(gocbcore.DcpCollectionModification) {}
func (r *reading) OSOSnapshot(gocbcore.DcpOSOSnapshot)                 {}
func (r *reading) SeqNoAdvanced(gocbcore.DcpSeqNoAdvanced)             {}

func cpu() float64 {
	var usage syscall.Rusage
	die("usage:", syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}

func peakKib() int64 {
	var usage syscall.Rusage
	die("usage:", syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return usage.Maxrss
}

func connected() *gocbcore.DCPAgent {
	scheme := "couchbase://"
	options := ""
	if os.Args[5] != "-" {
		scheme, options = "couchbases://", "?ca_cert_path="+os.Args[5]
	}
	config := gocbcore.DCPAgentConfig{}
	die("connection string:", config.FromConnStr(scheme+os.Args[1]+options))
	config.BucketName = os.Args[2]
	config.SecurityConfig.Auth = gocbcore.PasswordAuthProvider{Username: os.Args[3], Password: os.Args[4]}
	config.IoConfig.UseCollections = true
	config.CompressionConfig.Enabled = os.Args[6] == "snappy"
	agent, err := gocbcore.CreateDcpAgent(&config, "tailrace-peers", memd.DcpOpenFlagProducer)
	die("connect:", err)
	ready := make(chan error, 1)
	_, err = agent.WaitUntilReady(time.Now().Add(patience), gocbcore.WaitUntilReadyOptions{},
		func(_ *gocbcore.WaitUntilReadyResult, err error) { ready <- err })
	die("wait:", err)
	die("ready:", <-ready)
	return agent
}

func read(wanted uint64, check bool) answer {
	before := cpu()
	r := &reading{wanted: wanted, check: check, began: time.Now(), done: make(chan struct{})}
	agent := connected()
	snapshot, err := agent.ConfigSnapshot()
	die("map:", err)
	count, err := snapshot.NumVbuckets()
	die("vbuckets:", err)
	for vbucket := 0; vbucket < count; vbucket++ {
		_, err := agent.OpenStream(uint16(vbucket), 0, 0, 0, 0xffffffffffffffff, 0, 0, r,
			gocbcore.OpenStreamOptions{}, func(_ []gocbcore.FailoverEntry, err error) { die("stream:", err) })
		die("open stream:", err)
	}
	<-r.done
	_ = agent.Close()
	r.CPUS = cpu() - before
	r.PeakKib = peakKib()
	return r.answer
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		wanted, err := strconv.ParseUint(words[1], 10, 64)
		die("documents:", err)
		text, err := json.Marshal(read(wanted, words[0] == "check"))
		die("answer:", err)
		fmt.Println(string(text))
	}
}
