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

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

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
	t.Parallel()
	c := testcluster.Alone(t)
	js := c.JetStream()
	var f *cluster.Files
	testenv.WaitFor(t, "the store of files", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		var err error
		f, err = cluster.OpenFiles(ctx, js, c.Options["a"].Keys, 1, 1<<30, time.Hour)
		return err == nil
	})
	const task = "000000000001"
	whole := make([]byte, 3<<20+17)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(whole)
	if _, err := f.Put(t.Context(), task, &stopsAfter{bytes.NewReader(whole), 1 << 20}); !errors.Is(err, errStopped) {
		t.Fatalf("Put of a file that ends early = %v, want %v", err, errStopped)
	}
	parts, err := f.Put(t.Context(), task, bytes.NewReader(whole))
	if err != nil || len(parts) != 7 {
		t.Fatalf("Put = %d parts, %v, want 7", len(parts), err)
	}
	if s, err := js.Stream(t.Context(), "ARTIFACTS"); err != nil || s.CachedInfo().State.LastSeq != 7 {
		t.Errorf("messages sent = %d, %v, want 7: one for each part", s.CachedInfo().State.LastSeq, err)
	}
	r, err := f.Open(t.Context(), task, parts)
	if err != nil || r.Size() != int64(len(whole)) {
		t.Fatalf("Open = %v, want %d bytes", err, len(whole))
	}
	for _, from := range []int64{0, 1, 512 << 10, 700 << 10, int64(len(whole))} {
		if _, err := r.Seek(from, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, whole[from:]) {
			t.Errorf("read from %d = %d bytes, %v, want the rest of the file", from, len(got), err)
		}
	}
	if parts, err := f.Put(t.Context(), task, strings.NewReader("")); err != nil || len(parts) != 0 {
		t.Errorf("Put of an empty file = %v, %v, want no parts", parts, err)
	}
	read := func(task string, parts ...cluster.Part) error {
		r, err := f.Open(t.Context(), task, parts)
		if err == nil {
			_, err = io.ReadAll(r)
		}
		return err
	}
	wrong := parts[0]
	wrong.Size--
	if err := read(task, wrong); !errors.Is(err, cluster.ErrDamaged) {
		t.Errorf("read of a part with another size = %v, want %v", err, cluster.ErrDamaged)
	}
	if err := read(task, wrong, parts[1]); err == nil {
		t.Error("Open of a file with a short part in it succeeded, want an error")
	}
	if err := read("000000000002", parts...); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("read of another task's file = %v, want not found", err)
	}
}

// TestForgedFiles checks what the servers let a hostile worker do to the files of a task: not to delete
// or replace what is stored, and not to read it.
func TestForgedFiles(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	core := c.JetStream()
	open := func(js jetstream.JetStream, k *cluster.Keys) *cluster.Files {
		return testcluster.Open(t, func() (*cluster.Files, error) {
			return cluster.OpenFiles(t.Context(), js, k, 1, 1<<30, time.Hour)
		})
	}
	files := open(core, c.Options["a"].Keys)
	const task = "000000000001"
	keys, _ := c.Add("hostile", cluster.Worker)
	nc := c.Login(keys)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(2*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	// It knows what will be stored, and where it would store that itself.
	guess, err := open(js, keys).Put(t.Context(), "000000000002", strings.NewReader("the true file"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{guess[0].SHA256, guess[0].Name} {
		if _, err := js.Publish(t.Context(), "artifact."+task+"."+name, []byte("a false file")); err != nil {
			t.Fatal(err)
		}
	}
	parts, err := files.Put(t.Context(), task, strings.NewReader("the true file"))
	if err != nil {
		t.Fatal(err)
	}
	subject := "artifact." + task + "." + parts[0].Name
	if _, err := js.Publish(t.Context(), subject, []byte("a false file")); err == nil {
		t.Error("a second message of a part was stored, want it refused")
	}
	if _, err := js.Publish(t.Context(), subject, nil, jetstream.WithExpectStream("ARTIFACTS"), jetstream.WithMsgTTL(time.Second)); err == nil {
		t.Error("an empty message of a part was stored, want it refused")
	}
	if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: subject, Header: nats.Header{"Nats-Rollup": {"all"}}}); err == nil {
		t.Error("a message that replaces all others was stored, want it refused")
	}
	for _, request := range []string{"PURGE.ARTIFACTS", "DELETE.ARTIFACTS", "MSG.DELETE.ARTIFACTS", "MSG.GET.ARTIFACTS"} {
		body := `{"seq":1}`
		if m, err := nc.Request("$JS.API.STREAM."+request, []byte(body), time.Second); err == nil && !strings.Contains(string(m.Data), `"error"`) {
			t.Errorf("%s of a worker = %s, want it refused", request, m.Data)
		}
	}
	// It can store files of its own.
	if _, err := open(js, keys).Put(t.Context(), "000000000002", strings.NewReader("own")); err != nil {
		t.Errorf("Put of a worker = %v, want nil", err)
	}
	r, err := files.Open(t.Context(), task, parts)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || string(got) != "the true file" {
		t.Errorf("file = %q, %v, want the true one", got, err)
	}
	// Even a core cannot delete one by mistake.
	stream, err := core.Stream(t.Context(), "ARTIFACTS")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(stream.DeleteMsg(t.Context(), 1), stream.Purge(t.Context())); err == nil {
		t.Error("a core deleted files, want it refused")
	}
}

// TestFullCluster fills the store of files.
func TestFullCluster(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	js := c.JetStream()
	f := testcluster.Open(t, func() (*cluster.Files, error) {
		return cluster.OpenFiles(t.Context(), js, c.Options["a"].Keys, 1, 1<<20, time.Hour)
	})
	big := make([]byte, 3<<20)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(big)
	if _, err := f.Put(t.Context(), "000000000001", bytes.NewReader(big)); !errors.Is(err, cluster.ErrFull) {
		t.Errorf("Put into a full store = %v, want %v", err, cluster.ErrFull)
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
	text, err := cluster.Seal(i.Recipient, task, 7, []byte(secret))
	if err != nil || bytes.Contains(text, []byte(secret)) {
		t.Fatalf("Seal = %q, %v, want it encrypted", text, err)
	}
	if got, err := keys.Open(text, task, 7); err != nil || string(got) != secret {
		t.Errorf("Open = %q, %v, want the secret", got, err)
	}
	other, err := cluster.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	text[len(text)-1] ^= 1
	damaged := bytes.Clone(text)
	text[len(text)-1] ^= 1
	if text, err := cluster.Seal(i.Recipient, task, 7, make([]byte, 1<<20)); err == nil {
		t.Errorf("Seal of 1 MiB = %d bytes, want an error", len(text))
	}
	for what, f := range map[string]func() ([]byte, error){
		"another host":      func() ([]byte, error) { return other.Open(text, task, 7) },
		"another task":      func() ([]byte, error) { return keys.Open(text, "000000000002", 7) },
		"an earlier claim":  func() ([]byte, error) { return keys.Open(text, task, 6) },
		"a damaged message": func() ([]byte, error) { return keys.Open(damaged, task, 7) },
	} {
		if got, err := f(); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("Open with %s = %q, %v, want an error without the secret", what, got, err)
		}
	}
}
