package repo

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// pktLine returns a line in the framing of git's protocol.
func pktLine(s string) string { return fmt.Sprintf("%04x%s", len(s)+4, s) }

// hostileRemote speaks version 0 of git's protocol on each connection: it lists
// refs, and sends body when objects are requested. The writers end when git hangs
// up.
func hostileRemote(t *testing.T, list, body func(w io.Writer) error) Ref {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				buf := make([]byte, 64<<10)
				if _, err := conn.Read(buf); err != nil || list(conn) != nil {
					return
				}
				for asked := ""; !strings.Contains(asked, "done\n"); { // the wants, and the end of the negotiation
					n, err := conn.Read(buf)
					if err != nil {
						return
					}
					asked += string(buf[:n])
				}
				_ = body(conn)
			}()
		}
	}()
	ref, err := Parse("git://"+l.Addr().String()+"/owner/project", "/")
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

const someID = "1234567890123456789012345678901234567890"

func listOne(w io.Writer) error {
	_, err := io.WriteString(w, pktLine(someID+" refs/heads/main\x00side-band-64k\n")+"0000")
	return err
}

// until calls write repeatedly until it fails.
func until(write func(n int) error) error {
	for n := 0; ; n++ {
		if err := write(n); err != nil {
			return err
		}
	}
}

// A remote is bounded in bytes, references and time, for the first clone and for
// each later fetch, and leaves nothing behind that fills the disk.
func TestHostileRemote(t *testing.T) {
	wait := make(chan struct{})
	t.Cleanup(func() { close(wait) })
	// The start of a blob whose compressed data never ends: stored blocks of zeros.
	pack := "PACK\x00\x00\x00\x02\x00\x00\x00\x01" + "\xb0\x80\x80\x80\x80\x80\x01" + "\x78\x01"
	block := "\x00\xff\xff\x00\x00" + strings.Repeat("\x00", 65535)
	noBody := func(io.Writer) error { return nil }
	for name, c := range map[string]struct {
		list, body func(io.Writer) error
		bounds     Bounds
		code       fail.Code
		says       string
	}{
		"a pack without end": {listOne, func(w io.Writer) error {
			if _, err := io.WriteString(w, pktLine("NAK\n")+pktLine("\x01"+pack)); err != nil {
				return err
			}
			return until(func(int) error {
				for rest := block; rest != ""; {
					n := min(len(rest), 60000)
					if _, err := io.WriteString(w, pktLine("\x01"+rest[:n])); err != nil {
						return err
					}
					rest = rest[n:]
				}
				return nil
			})
		}, Bounds{Bytes: 4 << 20}, fail.Conflict, "limits.mirror_size"},
		"references without end": {func(w io.Writer) error {
			return until(func(n int) error {
				_, err := io.WriteString(w, pktLine(fmt.Sprintf("%s refs/heads/branch-%d\n", someID, n)))
				return err
			})
		}, noBody, Bounds{Memory: 256 << 20}, fail.Failure, "ls-remote"},
		"a million references": {func(w io.Writer) error {
			for from := 0; from < 1_000_000; from += 1000 {
				var b strings.Builder
				for n := range 1000 {
					b.WriteString(pktLine(fmt.Sprintf("%s refs/heads/b%d\n", someID, from+n)))
				}
				if _, err := io.WriteString(w, b.String()); err != nil {
					return err
				}
			}
			_, err := io.WriteString(w, "0000")
			return err
		}, noBody, Bounds{}, fail.Conflict, "limits.mirror_refs"},
		"few references, but over the limit": {func(w io.Writer) error {
			_, err := io.WriteString(w, pktLine(someID+" refs/heads/a\n")+pktLine(someID+" refs/heads/b\n")+pktLine(someID+" refs/tags/c\n")+"0000")
			return err
		}, noBody, Bounds{Refs: 2}, fail.Conflict, "limits.mirror_refs"},
		"silence": {func(io.Writer) error { <-wait; return io.EOF }, noBody, Bounds{Time: time.Second}, fail.Timeout, "limits.mirror_time"},
		"progress without end": {listOne, func(w io.Writer) error {
			if _, err := io.WriteString(w, pktLine("NAK\n")); err != nil {
				return err
			}
			return until(func(int) error {
				_, err := io.WriteString(w, pktLine("\x02"+strings.Repeat("working ", 4000)+"\r"))
				return err
			})
		}, Bounds{Time: 2 * time.Second}, fail.Timeout, "limits.mirror_time"},
		"a full disk": {listOne, noBody, Bounds{Reserve: 1 << 60}, fail.Host, "not enough free space"},
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			t.Setenv("GIT_CONFIG_GLOBAL", os.DevNull)
			ref := hostileRemote(t, c.list, c.body)
			m := mirrors(t)
			m.Bounds = c.bounds
			_, err := m.Ensure(t.Context(), ref, nil)
			if fail.CodeOf(err) != c.code || fail.HintOf(err) == "" || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("Ensure of a new mirror = %v (code %v, hint %q), want code %v, %q and a hint", err, fail.CodeOf(err), fail.HintOf(err), c.code, c.says)
			}
			if left := size(m.Dir); left > 0 {
				t.Errorf("bytes left by the clone = %d, want 0", left)
			}
			// And into an existing mirror, which stays as it is, with a warning.
			dir, err := m.mirrorDir(ref)
			if err != nil {
				t.Fatal(err)
			}
			host(t, filepath.Dir(m.Dir), "git init -q --bare '"+dir+"' && git -C '"+dir+"' config remote.origin.url "+ref.URL)
			before := size(dir)
			got, err := m.Ensure(t.Context(), ref, nil)
			if err != nil || !strings.Contains(got.Warning, c.says) {
				t.Errorf("Ensure of an old mirror = %v, warning %q, want %q", err, got.Warning, c.says)
			}
			if after := size(dir); after > before {
				t.Errorf("bytes left by the fetch = %d, want 0", after-before)
			}
		})
	}
}

// The size includes existing data, so that many fetches together are bounded too.
func TestMirrorSizeCountsWhatIsThere(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	m := mirrors(t)
	mirror := ensure(t, m, ref)
	advance(t, bare, "main")
	m.Bounds.Bytes = size(mirror.Dir)
	got, err := m.Ensure(t.Context(), ref, nil)
	if err != nil || !strings.Contains(got.Warning, "limits.mirror_size") {
		t.Errorf("Ensure = %v, warning %q, want nil, limits.mirror_size", err, got.Warning)
	}
	m.Bounds.Bytes += 1 << 20
	ensure(t, m, ref)
}

// On a disk that folds case, two branches must not become one with the commit of
// either. The first is kept, and the warning names the other.
func TestMirrorOnADiskThatFoldsCase(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	host(t, bare, `git branch topic main && git branch Topic feature && git branch x/été main && git branch "$(printf 'x/e\314\201te\314\201')" feature
		git update-ref refs/heads/work.LOCK main`)
	m := mirrors(t)
	m.folds = func(string) bool { return true }
	mirror, err := m.Ensure(t.Context(), ref, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(mirror.Warning, "3 branches and tags are left out") || !strings.Contains(mirror.Warning, "refs/heads/topic") ||
		!strings.Contains(mirror.Warning, "refs/heads/work.LOCK") {
		t.Errorf("warning = %q, want 3 names left out, refs/heads/topic and refs/heads/work.LOCK among them", mirror.Warning)
	}
	refs := strings.Fields(host(t, mirror.Dir, "git -c core.quotePath=false for-each-ref --format='%(refname)'"))
	folded := map[string]bool{}
	for _, name := range refs {
		if folded[foldName(name)] {
			t.Errorf("reference %s exists twice when case is folded, want once", name)
		}
		folded[foldName(name)] = true
	}
	equal(t, "Topic", host(t, mirror.Dir, "git rev-parse Topic"), host(t, bare, "git rev-parse feature"))

	// A branch that is renamed to the other case replaces the old one.
	host(t, bare, "git branch -D Topic")
	if mirror, err = m.Ensure(t.Context(), ref, nil); err != nil || strings.Contains(mirror.Warning, "topic") {
		t.Errorf("Ensure after removing Topic = %v, warning %q, want nil, no topic", err, mirror.Warning)
	}
	equal(t, "topic", host(t, mirror.Dir, "git rev-parse topic"), host(t, bare, "git rev-parse main"))

	m = mirrors(t) // on a case-sensitive disk, all exist
	m.folds = func(string) bool { return false }
	host(t, bare, "git update-ref -d refs/heads/work.LOCK")
	ensure(t, m, ref)
}

func TestFoldsNamesOfThisDisk(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "lower"), "")
	_, err := os.Stat(filepath.Join(dir, "LOWER"))
	if got := mirrors(t).foldsNames(dir); got != (err == nil) {
		t.Errorf("foldsNames = %t, want %t: opening LOWER = %v", got, err == nil, err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("files after the probe = %v, want 1", left)
	}
	if !mirrors(t).foldsNames(filepath.Join(dir, "missing")) {
		t.Error("foldsNames of an unknown disk = false, want true")
	}
}

// A fetch without changes requests only the list.
func TestEnsureFetchesOnlyWhatChanged(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	m := mirrors(t)
	ensure(t, m, ref)
	var said []string
	if _, err := m.Ensure(context.Background(), ref, func(s string) { said = append(said, s) }); err != nil || len(said) != 1 {
		t.Errorf("Ensure = %v, progress %q, want nil, 1 line", err, said)
	}
}
