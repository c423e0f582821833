package picker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// room is the private directory of one running picker. It holds fzf's socket and the
// rows that fzf reads. The lock in it shows that its picker runs.
type room struct {
	dir  string
	lock *store.Lock
	http http.Client
}

const (
	roomPrefix  = "asz-pick-"
	newSuffix   = "new-" // before it has its lock
	maxSocket   = 103    // bytes, on macOS
	roomTimeout = 3 * time.Second
)

// enter creates a room, and removes the rooms of pickers that were killed.
func enter() (*room, error) {
	parent := os.TempDir()
	if len(parent)+len("/"+roomPrefix+newSuffix+"1234567890/fzf.sock") > maxSocket {
		parent = "/tmp"
	}
	sweep(parent)
	fresh, err := os.MkdirTemp(parent, roomPrefix+newSuffix)
	if err != nil {
		return nil, fail.New(fail.Host, "create picker directory: %w", err)
	}
	lock, _, err := store.TryLock(filepath.Join(fresh, "lock"))
	if err == nil {
		// Only from now on may others check whether a picker uses it.
		dir := filepath.Join(parent, roomPrefix+strings.TrimPrefix(filepath.Base(fresh), roomPrefix+newSuffix))
		if err = os.Rename(fresh, dir); err == nil {
			return newRoom(dir, lock), nil
		}
	}
	return nil, fail.New(fail.Host, "create picker directory: %w", errors.Join(err, os.RemoveAll(fresh)))
}

func newRoom(dir string, lock *store.Lock) *room {
	r := &room{dir: dir, lock: lock}
	r.http = http.Client{Timeout: roomTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", r.socket())
		},
	}}
	return r
}

// inside returns the room of the picker that started this process.
func inside() *room { return newRoom(filepath.Dir(os.Getenv(rowsVar)), nil) }

func sweep(parent string) {
	dirs, _ := filepath.Glob(filepath.Join(parent, roomPrefix+"*"))
	for _, dir := range dirs {
		fi, err := os.Lstat(dir)
		if err != nil || !fi.IsDir() || !ours(fi) {
			continue
		}
		if strings.HasPrefix(filepath.Base(dir), roomPrefix+newSuffix) && time.Since(fi.ModTime()) < time.Hour {
			continue // another picker is about to use it
		}
		lock, free, err := store.TryLock(filepath.Join(dir, "lock"))
		if err != nil || !free {
			continue
		}
		_ = os.RemoveAll(dir) // the next picker tries again
		_ = lock.Unlock()
	}
}

// ours reports whether a file belongs to this user.
func ours(fi os.FileInfo) bool {
	st, ok := fi.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Getuid()
}

// leave removes the room.
func (r *room) leave() error { return errors.Join(os.RemoveAll(r.dir), r.lock.Unlock()) }

func (r *room) socket() string { return filepath.Join(r.dir, "fzf.sock") }
func (r *room) rows() string   { return filepath.Join(r.dir, "rows") }

// post sends actions to fzf.
func (r *room) post(ctx context.Context, actions string) error {
	return r.ask(ctx, http.MethodPost, "http://fzf/", actions, nil)
}

// hands is the state of the user's input: the query and the position of the cursor.
type hands struct {
	Query    string `json:"query"`
	Position int    `json:"position"`
}

func (r *room) hands(ctx context.Context) (h hands, err error) {
	return h, r.ask(ctx, http.MethodGet, "http://fzf/?limit=0", "", &h)
}

func (r *room) ask(ctx context.Context, method, url, body string, into any) error {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	// fzf requires the key if the user's environment has one.
	if key := os.Getenv("FZF_API_KEY"); key != "" {
		req.Header.Set("X-Api-Key", key)
	}
	res, err := r.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("fzf returned %s: %s", res.Status, bytes.TrimSpace(text))
	}
	if into != nil {
		return json.Unmarshal(text, into)
	}
	return nil
}
