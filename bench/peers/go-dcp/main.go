// Reads a bucket with go-dcp whenever it is asked to, and reports how long that took.
//
// Arguments: HOST:PORT BUCKET USER PASSWORD CA-FILE|- snappy|plain. A line on stdin asks for a reading,
// "read DOCUMENTS" or "check DOCUMENTS"; a line of JSON on stdout is the answer. go-dcp asks for compressed
// values in any case, and finds the cluster over HTTP.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/Trendyol/go-dcp"
	"github.com/Trendyol/go-dcp/config"
	"github.com/Trendyol/go-dcp/models"
	"github.com/Trendyol/go-dcp/wrapper"
)

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

// Every reading starts from scratch: nothing is kept of the last one.
type nothingKept struct{}

func (nothingKept) Save(map[uint16]*models.CheckpointDocument, map[uint16]bool, string) error {
	return nil
}
func (nothingKept) Clear([]uint16) error { return nil }

func (nothingKept) Load(vbuckets []uint16, uuid string) (
	*wrapper.ConcurrentSwissMap[uint16, *models.CheckpointDocument], bool, error,
) {
	state := wrapper.CreateConcurrentSwissMap[uint16, *models.CheckpointDocument](1024)
	for _, vbucket := range vbuckets {
		state.Store(vbucket, models.NewEmptyCheckpointDocument(uuid))
	}
	return state, false, nil
}

func usage() syscall.Rusage {
	var usage syscall.Rusage
	die("usage:", syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return usage
}

func cpu() float64 {
	used := usage()
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}

func freePort() int {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	die("port:", err)
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port
}

// go-dcp starts its HTTP server in a goroutine that nobody waits for, and Close() uses it: a reader that finishes sooner
// dies of a nil pointer. The server is up once its port answers.
func waitForAPI(port int) {
	for {
		connection, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			connection.Close()
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func read(wanted uint64, check bool) answer {
	before, began := cpu(), time.Now()
	var r answer
	var is_done atomic.Bool
	done := make(chan struct{})
	listener := func(context *models.ListenerContext) {
		mutation, is_mutation := context.Event.(models.DcpMutation)
		if !is_mutation || is_done.Load() {
			return
		}
		if r.Documents == 0 {
			r.FirstS = time.Since(began).Seconds()
		}
		r.ValueBytes += uint64(len(mutation.Value))
		r.Seqnos += mutation.SeqNo
		r.Cas ^= mutation.Cas
		if check {
			sum := crc32.Update(crc32.ChecksumIEEE(mutation.Key), crc32.IEEETable, mutation.Value)
			r.Contents += uint64(sum)
		}
		context.Ack()
		r.Documents++
		if r.Documents == wanted {
			r.Seconds = time.Since(began).Seconds()
			is_done.Store(true)
			close(done)
		}
	}
	settings := &config.Dcp{
		Hosts:              []string{"http://" + os.Args[1]},
		BucketName:         os.Args[2],
		Username:           os.Args[3],
		Password:           os.Args[4],
		Metadata:           config.Metadata{Type: config.MetadataTypeFile},
		Checkpoint:         config.Checkpoint{Type: "manual"},
		HealthCheck:        config.HealthCheck{Disabled: true},
		RollbackMitigation: config.RollbackMitigation{Disabled: true},
		API:                config.API{Port: freePort()},
		Logging:            config.Logging{Level: "error"},
		Dcp: config.ExternalDcp{
			Group:      config.DCPGroup{Name: "peers", Membership: config.DCPGroupMembership{Type: "static"}},
			BufferSize: 20 << 20,
		},
	}
	connector, err := dcp.NewDcp(settings, listener)
	die("connect:", err)
	connector.SetMetadata(nothingKept{})
	go connector.Start()
	<-connector.WaitUntilReady()
	<-done
	waitForAPI(settings.API.Port)
	connector.Close()
	r.CPUS = cpu() - before
	r.PeakKib = usage().Maxrss
	return r
}

func main() {
	// go-dcp writes to the standard output too: redirect that, so that only answers are there
	number, err := syscall.Dup(1)
	die("output:", err)
	die("output:", syscall.Dup3(2, 1, 0))
	answers := os.NewFile(uintptr(number), "answers")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		wanted, err := strconv.ParseUint(words[1], 10, 64)
		die("documents:", err)
		text, err := json.Marshal(read(wanted, words[0] == "check"))
		die("answer:", err)
		fmt.Fprintln(answers, string(text))
	}
}
