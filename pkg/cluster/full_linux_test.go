//go:build netns

package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestFullDiskInNamespaces fills the disk of the only core while its server writes. Once the disk has space again,
// the cluster works without a restart of the process, and has all that it acknowledged.
func TestFullDiskInNamespaces(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("root is needed to mount a small disk")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=48m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if _, err := cluster.Found(dir, "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	n, err := cluster.Start(t.Context(), dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Serve(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		n.Close()
	}()
	const id = "000000000001"
	data := []byte(`"` + strings.Repeat("x", 100<<10) + `"`)
	var newest uint64
	written := 0
	write := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		last, err := n.Tasks.Last(ctx, id)
		if err != nil && !errors.Is(err, cluster.ErrNone) {
			return err
		}
		seq, err := n.Tasks.Append(ctx, id, cluster.Entry{Kind: cluster.Submitted, Data: data}, last.Seq)
		if err == nil {
			newest = seq
			written++
		}
		return err
	}
	if err := write(); err != nil {
		t.Fatal(err)
	}
	filler, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	for size := 1 << 20; size > 0; {
		if _, err := filler.Write(bytes.Repeat([]byte{1}, size)); err != nil {
			size /= 2
		}
	}
	testenv.WaitFor(t, "the server's failure", func() bool { return write() != nil && n.CoreFailed() })
	if err := errors.Join(filler.Close(), os.Remove(filler.Name())); err != nil { // an open file would keep its space
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the server after its disk was full", func() bool { return write() == nil && write() == nil })
	found := 0
	testenv.WaitFor(t, "all entries", func() bool { // the witness starts again, too
		found = 0
		for e, err := range n.Tasks.Entries(t.Context(), id, 0) {
			if err != nil {
				return false
			}
			if found++; !bytes.Equal(e.Data, data) || e.Seq > newest {
				t.Errorf("entry %d = %d bytes, want those that were written", e.Seq, len(e.Data))
			}
		}
		return true
	})
	if found < written { // an entry whose acknowledgement was lost may be there, too
		t.Errorf("entries = %d, want at least the %d that were acknowledged", found, written)
	}
	if n.CoreFailed() {
		t.Error("the server still counts as failed, want it restarted")
	}
}
