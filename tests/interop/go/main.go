// Reads a bucket with gocbcore until stdin ends, and says on stdout what it is told, a word a line.
//
// Arguments: HOST:PORT BUCKET USER PASSWORD
package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/couchbase/gocbcore/v10"
	"github.com/couchbase/gocbcore/v10/memd"
)

const (
	patience = time.Minute
	again    = 50 * time.Millisecond // after a request met a connection that is lost
)

var stdout sync.Mutex

func say(what string, vbucket uint16, seqno uint64, more ...any) {
	stdout.Lock()
	defer stdout.Unlock()
	fmt.Print(what, " ", vbucket, " ", seqno)
	for _, word := range more {
		fmt.Print(" ", word)
	}
	fmt.Println()
}

func die(what string, err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, what, err)
		os.Exit(1)
	}
}

func digits(data []byte) string {
	if len(data) == 0 {
		return "-"
	}
	return hex.EncodeToString(data)
}

// One vbucket: where it stands, and its branch.
type stream struct {
	agent       *gocbcore.DCPAgent
	vbucket     uint16
	uuid        gocbcore.VbUUID
	seqno       uint64
	first, last uint64
}

func (s *stream) open() {
	start := gocbcore.SeqNo(s.seqno)
	first, last := gocbcore.SeqNo(s.first), gocbcore.SeqNo(s.last)
	_, err := s.agent.OpenStream(s.vbucket, 0, s.uuid, start, 0xffffffffffffffff, first, last, s,
		gocbcore.OpenStreamOptions{}, func(log []gocbcore.FailoverEntry, err error) {
			var rollback gocbcore.DCPRollbackError
			if errors.As(err, &rollback) {
				say("rollback", s.vbucket, uint64(rollback.SeqNo))
				s.seqno = uint64(rollback.SeqNo)
				s.first, s.last = s.seqno, s.seqno
				go s.open()
				return
			}
			if errors.Is(err, gocbcore.ErrSocketClosed) || errors.Is(err, gocbcore.ErrMemdClientClosed) {
				// gocbcore ends the streams of a lost connection before it stops handing that connection out.
				time.AfterFunc(again, s.open)
				return
			}
			if err != nil {
				say("failure", s.vbucket, 0, err)
				return
			}
			s.uuid = log[0].VbUUID
		})
	die("open stream:", err)
}

func (s *stream) SnapshotMarker(marker gocbcore.DcpSnapshotMarker) {
	s.first, s.last = marker.StartSeqNo, marker.EndSeqNo
	say("snapshot", s.vbucket, marker.EndSeqNo)
}

func (s *stream) Mutation(mutation gocbcore.DcpMutation) {
	s.seqno = mutation.SeqNo
	say("mutation", s.vbucket, mutation.SeqNo, digits(mutation.Key), digits(mutation.Value), mutation.Cas, mutation.RevNo)
}

func (s *stream) Deletion(deletion gocbcore.DcpDeletion) {
	s.seqno = deletion.SeqNo
	say("deletion", s.vbucket, deletion.SeqNo, digits(deletion.Key), "-", deletion.Cas, deletion.RevNo)
}

func (s *stream) Expiration(expiration gocbcore.DcpExpiration) {
	s.seqno = expiration.SeqNo
	say("deletion", s.vbucket, expiration.SeqNo, digits(expiration.Key), "-", expiration.Cas, expiration.RevNo)
}

func (s *stream) End(_ gocbcore.DcpStreamEnd, err error) {
	say("end", s.vbucket, 0, err)
	go s.open()
}

func (s *stream) CreateCollection(gocbcore.DcpCollectionCreation)     {}
func (s *stream) DeleteCollection(gocbcore.DcpCollectionDeletion)     {}
func (s *stream) FlushCollection(gocbcore.DcpCollectionFlush)         {}
func (s *stream) CreateScope(gocbcore.DcpScopeCreation)               {}
func (s *stream) DeleteScope(gocbcore.DcpScopeDeletion)               {}
func (s *stream) ModifyCollection(gocbcore.DcpCollectionModification) {}
func (s *stream) OSOSnapshot(gocbcore.DcpOSOSnapshot)                 {}
func (s *stream) SeqNoAdvanced(advanced gocbcore.DcpSeqNoAdvanced)    { s.seqno = advanced.SeqNo }

func main() {
	config := gocbcore.DCPAgentConfig{}
	die("connection string:", config.FromConnStr("couchbase://"+os.Args[1]))
	config.BucketName = os.Args[2]
	config.SecurityConfig.Auth = gocbcore.PasswordAuthProvider{Username: os.Args[3], Password: os.Args[4]}
	config.IoConfig.UseCollections = true
	agent, err := gocbcore.CreateDcpAgent(&config, "tailrace-interop", memd.DcpOpenFlagProducer)
	die("connect:", err)
	ready := make(chan error, 1)
	_, err = agent.WaitUntilReady(time.Now().Add(patience), gocbcore.WaitUntilReadyOptions{},
		func(_ *gocbcore.WaitUntilReadyResult, err error) { ready <- err })
	die("wait:", err)
	die("ready:", <-ready)
	snapshot, err := agent.ConfigSnapshot()
	die("map:", err)
	count, err := snapshot.NumVbuckets()
	die("vbuckets:", err)
	say("connected", uint16(count), 0)
	for vbucket := 0; vbucket < count; vbucket++ {
		(&stream{agent: agent, vbucket: uint16(vbucket)}).open()
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = agent.Close()
}
