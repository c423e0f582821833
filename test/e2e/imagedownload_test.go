//go:build e2e

package e2e

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// imagesName is the host name of the pretend internet's image server.
const imagesName = "images.example"

// TestImageDownload downloads the default image over HTTPS. It needs no VM: the
// downloaded image is refused before a VM starts.
func TestImageDownload(t *testing.T) {
	useForgeAddr(t, imagesName)
	b := newBox(t)
	forge := newForge(t, b.Home, random(), imagesName)
	b.trust(forge)
	s := newImageServer(t, b, forge)
	t.Run("failures", func(t *testing.T) { failedDownloads(t, b, forge, s) })
	t.Run("slow, and twice at once", func(t *testing.T) { downloadsAtOnce(t, b, forge, s) })
}

// trust makes the host trust a forge, and makes ubuntu the default image.
func (b *box) trust(forge *forge) {
	b.Write("ca.pem", string(forge.ca))
	b.Env = append(b.Env, "AGENT_SESSIONIZER_IMAGE=ubuntu", "XDG_DATA_HOME=", "SSL_CERT_FILE="+filepath.Join(b.Home, "ca.pem"))
}

// build makes a golden image and a snapshot of the default image.
var build = []string{"image", "build", "--from", "ubuntu", "--prepare", "warm", "--cpus", realvm.CPUs, "--memory", realvm.Memory}

var shippedImages = regexp.MustCompile(`(?s)\nimages:\n.*?\n\n`)

// useImage makes a path on the image server, with a digest, the default image. The
// rest is the shipped template, followed by more.
func (b *box) useImage(path, digest, more string) {
	b.t.Helper()
	shipped, err := sessionizer.Lima.ReadFile("lima/agent-sandbox.yaml")
	if err != nil || !shippedImages.Match(shipped) {
		b.t.Fatalf("lima/agent-sandbox.yaml = %v, want images in it", err)
	}
	own := fmt.Sprintf("\nimages:\n- {location: %q, arch: %s, digest: %q}\n\n%s", "https://"+imagesName+path, realvm.Image(b.t).Arch, digest, more)
	b.Write(".config/agent-sessionizer/agent-sandbox.yaml", shippedImages.ReplaceAllLiteralString(string(shipped), own))
}

// imageServer offers images that are too large for any session's disk. The program
// notices that only after the download.
type imageServer struct {
	huge []byte
	gate atomic.Pointer[chan struct{}] // requests for /gate… wait for it, halfway

	mu     sync.Mutex
	ranges map[string][]string // requested ranges, by path
}

const tooLarge = "is smaller than the image"

func newImageServer(t *testing.T, b *box, forge *forge) *imageServer {
	s := &imageServer{ranges: map[string][]string{}}
	path := filepath.Join(t.TempDir(), "huge.qcow2")
	if r := b.Run("qemu-img", "create", "-q", "-f", "qcow2", path, "900G"); r.Code != 0 {
		t.Fatalf("qemu-img create = exit %d\n%s\nwant exit 0", r.Code, r.All())
	}
	header, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s.huge = append(header, bytes.Repeat([]byte("unused cluster  "), 4<<20/16)...)
	forge.http.Handle(imagesName+"/", s)
	return s
}

func (s *imageServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	s.mu.Lock()
	s.ranges[path] = append(s.ranges[path], r.Header.Get("Range"))
	first := len(s.ranges[path]) == 1
	s.mu.Unlock()
	half := func() {
		w.Header().Set("Content-Length", strconv.Itoa(len(s.huge)))
		_, _ = w.Write(s.huge[:len(s.huge)/2])
		_ = http.NewResponseController(w).Flush()
	}
	switch {
	case path == "/missing.qcow2":
		http.NotFound(w, r)
	case path == "/cut.qcow2" && first:
		half()
		panic(http.ErrAbortHandler) // cuts the connection
	case strings.HasPrefix(path, "/gate/"):
		half()
		select {
		case <-*s.gate.Load():
		case <-r.Context().Done():
		}
		_, _ = w.Write(s.huge[len(s.huge)/2:])
	default:
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(s.huge))
	}
}

// got returns the requested ranges, "" for the whole file.
func (s *imageServer) got(path string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ranges[path]
}

// failedDownloads makes each download, or the downloaded image, fail. None leaves
// anything behind.
func failedDownloads(t *testing.T, b *box, forge *forge, s *imageServer) {
	digest := fmt.Sprintf("sha256:%x", sha256.Sum256(s.huge))
	try := func(name, path, digest string, code int, text string) {
		t.Helper()
		b.useImage(path, digest, "")
		b.Fails(code, text, build...)
		for _, pattern := range []string{".cache/agent-sessionizer/download/*/*/part-*", ".agent-vms/golden-*"} {
			left, err := filepath.Glob(filepath.Join(b.Home, pattern))
			for _, file := range left {
				if st, serr := os.Stat(file); serr != nil || st.Size() > 0 {
					t.Errorf("%s: %s after the download: %v, want it removed", name, file, serr)
				}
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	try("not found", "/missing.qcow2", digest, 3, "the server responded 404")
	try("wrong digest", "/huge.qcow2", "sha256:"+strings.Repeat("0", 64), 1, "has the digest "+digest)
	try("cut off", "/cut.qcow2", digest, 2, tooLarge)
	try("from the cache", "/cut.qcow2", digest, 2, tooLarge)
	if got := s.got("/cut.qcow2"); !slices.Equal(got, []string{"", fmt.Sprintf("bytes=%d-", len(s.huge)/2)}) {
		t.Errorf("ranges asked for: %q, want one download that goes on where it was cut off", got)
	}
	t.Run("full disk", func(t *testing.T) {
		full := filepath.Join(b.Home, "full")
		if err := os.Mkdir(full, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mount("none", full, "tmpfs", 0, "size=1m"); err != nil {
			t.Fatal(err)
		}
		defer syscall.Unmount(full, 0)
		env := b.Env
		b.Env = append(env[:len(env):len(env)], "XDG_CACHE_HOME="+full)
		try("full disk", "/full.qcow2", digest, 5, "the disk is full")
		try("full disk", "/full.qcow2", digest, 5, "agent-sessionizer image prune")
		b.Env = env
	})
}

// downloadsAtOnce starts two sessions from the same image, which arrives slowly: one
// of them fetches it, and reports its progress.
func downloadsAtOnce(t *testing.T, b *box, forge *forge, s *imageServer) {
	gate := make(chan struct{})
	s.gate.Store(&gate)
	b.useImage("/gate/both.qcow2", fmt.Sprintf("sha256:%x", sha256.Sum256(s.huge)), "")
	env := b.Env
	b.Env = append(env[:len(env):len(env)], "AGENT_SESSIONIZER_PREPARE=none")
	results := make(chan realvm.Result)
	for _, repo := range []string{"left", "right"} {
		b.Repo(repo)
		go func() {
			results <- b.Run("agent-sessionizer", "open", "-d", "./"+repo)
		}()
	}
	progress := fmt.Sprintf("downloading both.qcow2: 0 of %d MB", len(s.huge)/1e6)
	testenv.WaitFor(t, "the download, and a session that waits for it", func() bool {
		logs := ""
		for _, v := range b.List() {
			logs += b.Asz("logs", v.Name)
		}
		return strings.Contains(logs, progress) && strings.Contains(logs, "another process is downloading")
	})
	close(gate)
	for range 2 {
		if r := <-results; r.Code != 2 || !strings.Contains(r.All(), tooLarge) {
			t.Errorf("open = exit %d: %s, want exit 2 with %q", r.Code, r.All(), tooLarge)
		}
	}
	if got := s.got("/gate/both.qcow2"); len(got) != 1 {
		t.Errorf("downloads = %d, want 1", len(got))
	}
	for _, v := range b.List() {
		b.Asz("destroy", "--force", v.Name)
	}
	b.Env = env
}
