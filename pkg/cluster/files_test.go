package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// stopsAfter fails after some bytes, as the file of a host that dies.
type stopsAfter struct {
	io.Reader
	left int
}

var errStopped = errors.New("stopped")

func (r *stopsAfter) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, errStopped
	}
	n, err := r.Reader.Read(p[:min(len(p), r.left)])
	r.left -= n
	return n, err
}

func TestFiles(t *testing.T) {
	c := testcluster.Alone(t)
	js := c.JetStream()
	var f *cluster.Files
	testenv.WaitFor(t, "the store of files", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		var err error
		f, err = cluster.OpenFiles(ctx, js, 1, 1<<30, time.Hour)
		return err == nil
	})
	const task = "000000000001"
	whole := make([]byte, 20<<20+17)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(whole)
	if _, err := f.Put(t.Context(), task, &stopsAfter{bytes.NewReader(whole), 9 << 20}); !errors.Is(err, errStopped) {
		t.Fatalf("Put of a file that ends early = %v, want %v", err, errStopped)
	}
	parts, err := f.Put(t.Context(), task, bytes.NewReader(whole))
	if err != nil || len(parts) != 3 {
		t.Fatalf("Put = %d parts, %v, want 3", len(parts), err)
	}
	var got bytes.Buffer
	for _, from := range []int64{0, 1, 8 << 20, 9 << 20, int64(len(whole))} {
		got.Reset()
		if err := f.Get(t.Context(), task, parts, from, &got); err != nil || !bytes.Equal(got.Bytes(), whole[from:]) {
			t.Errorf("Get from %d = %d bytes, %v, want the rest of the file", from, got.Len(), err)
		}
	}
	if parts, err := f.Put(t.Context(), task, strings.NewReader("")); err != nil || len(parts) != 0 {
		t.Errorf("Put of an empty file = %v, %v, want no parts", parts, err)
	}
	wrong := parts[0]
	wrong.Size--
	if err := f.Get(t.Context(), task, []cluster.Part{wrong}, 0, io.Discard); err == nil {
		t.Error("Get of a part with another size succeeded, want an error")
	}
	if err := f.Get(t.Context(), "000000000002", parts, 0, io.Discard); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("Get of another task's file = %v, want not found", err)
	}
}

func TestSeal(t *testing.T) {
	keys, err := cluster.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	i, err := keys.Identity("box", cluster.Worker)
	if err != nil {
		t.Fatal(err)
	}
	const task, secret = "000000000001", "pretend-secret-0123456789"
	text, err := cluster.Seal(i.Recipient, task, 7, map[string]string{"TOKEN": secret})
	if err != nil || bytes.Contains(text, []byte(secret)) {
		t.Fatalf("Seal = %q, %v, want it encrypted", text, err)
	}
	if got, err := keys.Open(text, task, 7); err != nil || got["TOKEN"] != secret {
		t.Errorf("Open = %v, %v, want the secret", got, err)
	}
	other, err := cluster.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	text[len(text)-1] ^= 1
	damaged := bytes.Clone(text)
	text[len(text)-1] ^= 1
	for what, f := range map[string]func() (map[string]string, error){
		"another host":      func() (map[string]string, error) { return other.Open(text, task, 7) },
		"another task":      func() (map[string]string, error) { return keys.Open(text, "000000000002", 7) },
		"an earlier claim":  func() (map[string]string, error) { return keys.Open(text, task, 6) },
		"a damaged message": func() (map[string]string, error) { return keys.Open(damaged, task, 7) },
	} {
		if got, err := f(); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("Open with %s = %v, %v, want an error without the secret", what, got, err)
		}
	}
}
