package picker

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// pretend is a simulated fzf behind the socket, whose user types all the time or not at
// all.
type pretend struct {
	mu     sync.Mutex
	typing bool
	asked  int
	posts  []string
	at     []int // number of requests before each post
}

func (f *pretend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Method == http.MethodGet {
		f.asked++
		query := 0
		if f.typing {
			query = f.asked
		}
		fmt.Fprintf(w, `{"query": "%d", "position": 0}`, query)
		return
	}
	body, _ := io.ReadAll(r.Body)
	f.posts, f.at = append(f.posts, string(body)), append(f.at, f.asked)
}

// TestFollow checks that changed rows are sent to fzf, that typing delays this but not
// for ever, that a preview is redrawn if only the preview changed, and that nothing is
// sent if nothing changed.
func TestFollow(t *testing.T) {
	t.Setenv("FZF_API_KEY", "")
	parent := testenv.ShortDir(t)
	p := newPicker(t)
	t.Setenv("TMPDIR", parent)
	r, err := newPickerDir()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", r.socket())
	if err != nil {
		t.Fatal(err)
	}
	fake := &pretend{typing: true}
	server := http.Server{Handler: fake}
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = server.Serve(l) })
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() {
		cancel()
		_ = server.Close()
		tasks.Wait()
		_ = r.remove()
	})

	p.put(t, row{id: "aaaaaaaaaaaa", slug: "o/first", phase: session.Ready})
	lines, observations, err := p.now(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other := *p // a Picker must not be shared between goroutines; the store may be
	tasks.Go(func() { p.follow(ctx, r, strings.Join(lines, "\n"), observations) })
	seen := func() (posts []string, at []int, asked int) {
		fake.mu.Lock()
		defer fake.mu.Unlock()
		return fake.posts, fake.at, fake.asked
	}
	testenv.WaitFor(t, "the first look", func() bool { _, _, asked := seen(); return asked >= 3 })
	if posts, _, _ := seen(); len(posts) != 0 {
		t.Errorf("requests to fzf without a change = %q, want none", posts)
	}

	_, _, before := seen()
	other.put(t, row{id: "bbbbbbbbbbbb", slug: "o/second", phase: session.Stopped})
	testenv.WaitFor(t, "the new row", func() bool { posts, _, _ := seen(); return len(posts) > 0 })
	posts, at, _ := seen()
	if !strings.HasPrefix(posts[0], "track-current+reload-sync(") || strings.Contains(posts[0], parent) {
		t.Errorf("first request to fzf = %q, want a reload without %q", posts[0], parent)
	}
	if waited := at[0] - before; waited < maxPatience {
		t.Errorf("polls waited for while the user types = %d, want at least %d", waited, maxPatience)
	}
	text, err := os.ReadFile(r.rows())
	if err != nil || !strings.Contains(string(text), "o/second") || !strings.HasSuffix(string(text), "\n") {
		t.Errorf("rows for fzf = %q, %v, want o/second and whole lines", text, err)
	}

	// The content of an agent's screen is not part of a row. At the end of a minute, ages change in
	// the rows, and new rows also make fzf draw the preview again.
	before = len(posts)
	other.observation(t, "aaaaaaaaaaaa", guestproto.Observation{Screen: []string{"new"}})
	testenv.WaitFor(t, "the new preview", func() bool { posts, _, _ = seen(); return len(posts) > before })
	if last := posts[len(posts)-1]; last != "refresh-preview" && !strings.HasPrefix(last, "track-current+reload-sync(") {
		t.Errorf("request to fzf after the screen changed = %q, want refresh-preview or a reload", last)
	}
}
