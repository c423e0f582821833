//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// searchDisk searches for the secret in the stopped VM's disk as the guest wrote it,
// and in every file of the VM's and the product's directories. It unpacks the qcow2
// file first, because that format may split a run of bytes.
func searchDisk(t *testing.T, b *box, name, secret string) {
	t.Helper()
	raw := filepath.Join(b.Home, "raw")
	defer os.Remove(raw)
	disk := filepath.Join(b.Home, ".agent-vms", name, "diffdisk")
	if out, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-O", "raw", disk, raw).CombinedOutput(); err != nil {
		t.Fatalf("unpack the disk: %v\n%s", err, out)
	}
	n, found, err := search(raw, []byte(secret))
	if err != nil {
		t.Fatal(err)
	}
	if n < 200<<20 {
		t.Errorf("bytes searched on the disk = %d, want at least %d", n, 200<<20)
	}
	if found {
		t.Error("secret on the VM's disk = found, want none")
	}
	// Prove that the search works: it must find the repository's file.
	if _, found, err := search(raw, []byte("not committed\n")); err != nil || !found {
		t.Errorf("file on the disk = found: %t, %v, want true", found, err)
	}
	os.Remove(raw)
	searchHome(t, b, secret, "secret-file")
}

// search reads the data extents of a sparse file.
func search(path string, what []byte) (read int64, found bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, false, err
	}
	defer f.Close()
	buf := make([]byte, 4<<20)
	for at := int64(0); ; {
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if err != nil {
			return read, false, nil // no more data
		}
		end, err := unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return read, false, err
		}
		keep := 0
		for pos := start; pos < end; {
			n, err := f.ReadAt(buf[keep:min(int64(len(buf)), int64(keep)+end-pos)], pos)
			if n == 0 && err != nil {
				if err == io.EOF {
					break
				}
				return read, false, err
			}
			read, pos = read+int64(n), pos+int64(n)
			if bytes.Contains(buf[:keep+n], what) {
				return read, true, nil
			}
			// what may span two reads
			tail := min(len(what), keep+n)
			copy(buf, buf[keep+n-tail:keep+n])
			keep = tail
		}
		at = end
	}
}

// cmdlines watches the arguments of all processes for a secret.
type cmdlines struct {
	stop  context.CancelFunc
	done  chan struct{}
	found atomic.Pointer[string]
	seen  atomic.Int64
}

func watchCmdlines(t *testing.T, secret string) *cmdlines {
	ctx, cancel := context.WithCancel(context.Background())
	w := &cmdlines{stop: cancel, done: make(chan struct{})}
	t.Cleanup(func() { cancel(); <-w.done })
	go func() {
		defer close(w.done)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
			for _, file := range files {
				text, err := os.ReadFile(file)
				if err != nil {
					continue
				}
				w.seen.Add(1)
				if strings.Contains(string(text), secret) {
					line := string(text)
					w.found.Store(&line)
				}
			}
		}
	}()
	return w
}

func (w *cmdlines) check(t *testing.T) {
	t.Helper()
	if line := w.found.Load(); line != nil {
		t.Errorf("command line with the secret = %q, want none", *line)
	}
	if w.seen.Load() == 0 {
		t.Error("command lines looked at = 0, want some")
	}
}
