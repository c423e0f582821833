package lima

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/opencontainers/go-digest"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// content is the image that the tests' server has.
var content = bytes.Repeat([]byte("0123456789abcdef"), 64<<10)

const half = 512 << 10

// imageServer serves content. The handlers in script answer its first requests, one
// each.
type imageServer struct {
	*httptest.Server
	mu     sync.Mutex
	script []http.HandlerFunc
	ranges []string // the Range header of each request
}

func newImageServer(t *testing.T, script ...http.HandlerFunc) *imageServer {
	s := &imageServer{script: script}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.ranges = append(s.ranges, r.Header.Get("Range"))
		answer := serveContent
		if len(s.script) > 0 {
			answer, s.script = s.script[0], s.script[1:]
		}
		s.mu.Unlock()
		answer(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func serveContent(w http.ResponseWriter, r *http.Request) {
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
}

// cut sends the first half and breaks the connection.
func cut(w http.ResponseWriter, _ *http.Request) {
	sendHalf(w)
	panic(http.ErrAbortHandler)
}

// hang sends the first half, and nothing more until the client gives up.
func hang(w http.ResponseWriter, r *http.Request) {
	sendHalf(w)
	<-r.Context().Done()
}

func sendHalf(w http.ResponseWriter) {
	w.Header().Set("Content-Length", fmt.Sprint(len(content)))
	_, _ = w.Write(content[:half])
	_ = http.NewResponseController(w).Flush()
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
}

func (s *imageServer) download(t *testing.T) download {
	return download{url: s.URL + "/x.qcow2", digest: digest.FromBytes(content), dir: filepath.Join(t.TempDir(), "cache"), stall: time.Minute, quiet: time.Minute}
}

// requests returns the Range headers of all requests so far.
func (s *imageServer) requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ranges)
}

func checkDownloaded(t *testing.T, dl download, path string, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, content) {
		t.Errorf("downloaded %d bytes, %v; want the server's %d", len(got), err, len(content))
	}
	if parts, _ := filepath.Glob(dl.file("part-*")); len(parts) > 0 {
		t.Errorf("parts after the download = %q, want none", parts)
	}
}

func TestDownloadGoesOnAfterAnInterruption(t *testing.T) {
	rest := fmt.Sprintf("bytes=%d-", half)
	for name, c := range map[string]struct {
		script []http.HandlerFunc
		want   []string
	}{
		"nothing goes wrong":          {nil, []string{""}},
		"the connection breaks":       {[]http.HandlerFunc{cut}, []string{"", rest}},
		"it breaks, then errors":      {[]http.HandlerFunc{cut, status(503), status(429)}, []string{"", rest, rest, rest}},
		"the server knows no ranges":  {[]http.HandlerFunc{cut, cut}, []string{"", rest, rest}},
		"its file has become shorter": {[]http.HandlerFunc{cut, status(416)}, []string{"", rest, ""}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newImageServer(t, c.script...)
			dl := s.download(t)
			path, err := dl.run(t.Context())
			checkDownloaded(t, dl, path, err)
			if got := s.requests(); !slices.Equal(got, c.want) {
				t.Errorf("ranges requested = %q, want %q", got, c.want)
			}
		})
	}
}

// A killed process leaves its partial download to the next one.
func TestDownloadGoesOnInAnotherProcess(t *testing.T) {
	s := newImageServer(t, hang)
	dl := s.download(t)
	ctx, cancel := context.WithCancel(t.Context())
	dl.say = func(string) {
		if st, err := os.Stat(dl.file("part-" + dl.digest.Encoded())); err == nil && st.Size() > 0 {
			cancel()
		}
	}
	dl.stall = time.Second // by then half of the file has arrived, as the next request shows
	if _, err := dl.run(ctx); err == nil {
		t.Fatal("cancelled download = nil, want an error")
	}
	dl.stall, dl.say = time.Minute, nil
	path, err := dl.run(t.Context())
	checkDownloaded(t, dl, path, err)
	got := s.requests()
	if last := got[len(got)-1]; last == "" || last == "bytes=0-" {
		t.Errorf("ranges asked for: %q; want the rest last", got)
	}
	if _, err := dl.run(t.Context()); err != nil || len(s.requests()) != len(got) {
		t.Errorf("once more: %v, %d requests; want it out of the cache", err, len(s.requests())-len(got))
	}
}

func TestDownloadFromAServerThatHangs(t *testing.T) {
	s := newImageServer(t, hang)
	dl := s.download(t)
	dl.stall = time.Second
	path, err := dl.run(t.Context())
	checkDownloaded(t, dl, path, err)
	if got := s.requests(); len(got) < 2 || got[1] == "" {
		t.Errorf("ranges asked for: %q; want the rest after the first", got)
	}
}

// A download that gets no data reports that before the try is given up, whether the
// server has answered or not.
func TestDownloadReportsAStall(t *testing.T) {
	silent := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for name, answer := range map[string]http.HandlerFunc{"in the middle": hang, "before the answer": silent} {
		t.Run(name, func(t *testing.T) {
			dl := newImageServer(t, answer).download(t)
			dl.quiet = 10 * time.Millisecond
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			const want = "downloading x.qcow2: stalled, no data for 10ms; retrying after 1m0s"
			reported := false
			dl.say = func(text string) {
				if text == want {
					reported = true
					cancel()
				}
			}
			if _, err := dl.run(ctx); !errors.Is(err, context.Canceled) || !reported {
				t.Errorf("run = %v, reported: %t, want %v after a report", err, reported, context.Canceled)
			}
		})
	}
}

func TestDownloadWithAnotherDigest(t *testing.T) {
	s := newImageServer(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "another image") })
	dl := s.download(t)
	_, err := dl.run(t.Context())
	if fail.CodeOf(err) != fail.Failure || fail.HintOf(err) == "" || !strings.Contains(err.Error(), dl.digest.String()) {
		t.Errorf("wrong content: %v (hint %q); want a failure that names the digest", err, fail.HintOf(err))
	}
	path, err := dl.run(t.Context())
	checkDownloaded(t, dl, path, err)

	// What the cache has under the same URL must not be used for another digest.
	other := dl
	other.digest = digest.FromString("another image")
	if _, err := other.run(t.Context()); fail.CodeOf(err) != fail.Failure {
		t.Errorf("another digest for the same URL: %v; want a failure", err)
	}
}

func TestDownloadThatIsRefused(t *testing.T) {
	for _, code := range []int{http.StatusNotFound, http.StatusForbidden, http.StatusGone} {
		s := newImageServer(t, status(code))
		dl := s.download(t)
		_, err := dl.run(t.Context())
		if fail.CodeOf(err) != fail.NotFound || fail.HintOf(err) == "" || !strings.Contains(err.Error(), fmt.Sprint(code)) || !strings.Contains(err.Error(), s.URL) {
			t.Errorf("run with status %d = %v (hint %q), want code %v with the URL, the status and a hint", code, err, fail.HintOf(err), fail.NotFound)
		}
		if n := len(s.requests()); n != 1 {
			t.Errorf("requests with status %d = %d, want 1", code, n)
		}
		if parts, _ := filepath.Glob(dl.file("part-*")); len(parts) > 0 {
			t.Errorf("parts after status %d = %q, want none", code, parts)
		}
	}
	broken := slices.Repeat([]http.HandlerFunc{status(500)}, 2*downloadTries)
	s := newImageServer(t, append([]http.HandlerFunc{cut}, broken...)...)
	dl := s.download(t)
	_, err := dl.run(t.Context())
	if fail.CodeOf(err) != fail.Host || len(s.requests()) != 1+downloadTries {
		t.Errorf("a broken server: %v after %d requests, want to give up after %d", err, len(s.requests()), 1+downloadTries)
	}
	if st, err := os.Stat(dl.file("part-" + dl.digest.Encoded())); err != nil || st.Size() != half {
		t.Errorf("part after an interruption = %v, want %d bytes", err, half)
	}
}

func TestDownloadOntoAFullDisk(t *testing.T) {
	const hint = "df -h # and: agent-sessionizer destroy SESSION, agent-sessionizer image prune"
	for name, c := range map[string]struct {
		script []http.HandlerFunc
		full   bool
	}{
		"it gets full":   {nil, true},
		"it will not do": {[]http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Length", "4000000000000000") }}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newImageServer(t, c.script...)
			d := newDriver(t)
			dl := s.download(t)
			dl.dir = d.images.entry(dl.url)
			part := dl.file("part-" + dl.digest.Encoded())
			if err := os.MkdirAll(dl.dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if c.full {
				if err := os.Symlink("/dev/full", part); err != nil {
					t.Fatal(err)
				}
			}
			err := d.images.placeDisk(t.Context(), limayaml.File{Location: dl.url, Digest: dl.digest}, filepath.Join(t.TempDir(), "disk"), nil)
			if fail.CodeOf(err) != fail.Host || !strings.Contains(err.Error(), "disk is full") || fail.HintOf(err) != hint {
				t.Errorf("placeDisk on a full disk = %v (hint %q), want \"disk is full\" (hint %q)", err, fail.HintOf(err), hint)
			}
			if st, err := os.Lstat(part); err == nil && (c.full || st.Size() > 0) {
				t.Errorf("part after the full disk = %d bytes, want none", st.Size())
			}
			if n := len(s.requests()); n != 1 {
				t.Errorf("asked %d times, want once", n)
			}
		})
	}
}

func TestDownloadTwiceAtOnce(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	s := newImageServer(t, func(w http.ResponseWriter, r *http.Request) {
		close(begun)
		<-release
		serveContent(w, r)
	})
	dl := s.download(t)
	var both sync.WaitGroup
	run := func(dl download) {
		both.Go(func() {
			if path, err := dl.run(t.Context()); err != nil {
				t.Error(err)
			} else if st, err := os.Stat(path); err != nil || st.Size() != int64(len(content)) {
				t.Errorf("downloaded file %s = %v, want %d bytes", path, err, len(content))
			}
		})
	}
	run(dl)
	<-begun
	second := dl
	second.say = func(line string) {
		if strings.Contains(line, "waiting") {
			close(release)
		}
	}
	run(second)
	both.Wait()
	if n := len(s.requests()); n != 1 {
		t.Errorf("asked %d times, want once", n)
	}
}

// The user's own image is copied: its file may change while VMs run.
func TestPlaceCopiesWhatHasADigest(t *testing.T) {
	s := newImageServer(t)
	d := newDriver(t)
	local := filepath.Join(t.TempDir(), "x.qcow2")
	if err := os.WriteFile(local, content, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, from := range []string{local, s.URL + "/x.qcow2"} {
		dest := filepath.Join(t.TempDir(), "disk")
		if err := d.images.placeDisk(t.Context(), limayaml.File{Location: from, Digest: digest.FromBytes(content)}, dest, nil); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Lstat(dest); err != nil || !st.Mode().IsRegular() || st.Size() != int64(len(content)) {
			t.Errorf("disk from %s = %v, %v, want a copy", from, st, err)
		}
		err := d.images.placeDisk(t.Context(), limayaml.File{Location: from, Digest: digest.FromString("x")}, dest+"2", nil)
		if fail.CodeOf(err) != fail.Failure || fail.HintOf(err) == "" {
			t.Errorf("placeDisk of %s with another digest = %v (hint %q), want code %v with a hint", from, err, fail.HintOf(err), fail.Failure)
		}
	}
}
