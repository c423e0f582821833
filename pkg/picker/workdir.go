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
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// workDir is the private directory of one running picker. It holds fzf's socket and the
// rows that fzf reads. The lock in it shows that its picker runs.
type workDir struct {
	dir  string
	lock *lockfile.Lock
	http http.Client
}

const (
	workDirPrefix  = "asz-pick-"
	maxSocket      = 103 // bytes, on macOS
	workDirTimeout = 3 * time.Second
)

// newPickerDir creates a working directory, and removes those of pickers that were killed.
func newPickerDir() (*workDir, error) {
	parent := os.TempDir()
	if len(parent)+len("/"+workDirPrefix+"1234567890/fzf.sock") > maxSocket {
		parent = "/tmp"
	}
	dir, lock, err := lockfile.TempDir(parent, workDirPrefix, os.RemoveAll)
	if err != nil {
		return nil, fail.New(fail.Host, "create picker directory: %w", err)
	}
	return openWorkDir(dir, lock), nil
}

func openWorkDir(dir string, lock *lockfile.Lock) *workDir {
	r := &workDir{dir: dir, lock: lock}
	r.http = http.Client{Timeout: workDirTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", r.socket())
		},
	}}
	return r
}

// currentWorkDir returns the working directory of the picker that started this process.
func currentWorkDir() *workDir { return openWorkDir(filepath.Dir(os.Getenv(rowsVar)), nil) }

// remove removes the directory.
func (r *workDir) remove() error { return errors.Join(os.RemoveAll(r.dir), r.lock.Unlock()) }

func (r *workDir) socket() string { return filepath.Join(r.dir, "fzf.sock") }
func (r *workDir) rows() string   { return filepath.Join(r.dir, "rows") }

// post sends actions to fzf.
func (r *workDir) post(ctx context.Context, actions string) error {
	return r.ask(ctx, http.MethodPost, "http://fzf/", actions, nil)
}

// cursor is the state of the user's input: the query and the position of the cursor.
type cursor struct {
	Query    string `json:"query"`
	Position int    `json:"position"`
}

func (r *workDir) cursor(ctx context.Context) (h cursor, err error) {
	return h, r.ask(ctx, http.MethodGet, "http://fzf/?limit=0", "", &h)
}

func (r *workDir) ask(ctx context.Context, method, url, body string, into any) error {
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
