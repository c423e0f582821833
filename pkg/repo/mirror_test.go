package repo

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestEnsureClonesOnceAndThenFetches(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	m := mirrors(t)
	mirror := ensure(t, m, ref)
	equal(t, "main", host(t, mirror.Dir, "git rev-parse main"), host(t, bare, "git rev-parse main"))
	equal(t, "HEAD", host(t, mirror.Dir, "git symbolic-ref HEAD"), "refs/heads/main")

	// Agents' work stays; references that the remote deleted are removed.
	host(t, mirror.Dir, "git update-ref refs/agents/s/HEAD feature")
	tip := advance(t, bare, "main")
	host(t, bare, "git branch -D feature && git branch -m main trunk && git symbolic-ref HEAD refs/heads/trunk")
	ensure(t, m, ref)
	equal(t, "trunk", host(t, mirror.Dir, "git rev-parse trunk"), tip)
	equal(t, "HEAD", host(t, mirror.Dir, "git symbolic-ref HEAD"), "refs/heads/trunk")
	equal(t, "refs", host(t, mirror.Dir, "git for-each-ref --format='%(refname)'"), "refs/agents/s/HEAD\nrefs/heads/trunk\nrefs/tags/v1")
}

func TestEnsureNeverRunsHooks(t *testing.T) {
	home := isolate(t)
	ref, bare := upstream(t)
	trap := filepath.Join(home, "hooks")
	for _, name := range []string{"reference-transaction", "post-checkout", "post-update", "pre-auto-gc"} {
		write(t, filepath.Join(trap, name), "#!/bin/sh\ntouch '"+home+"/ran'\n")
		if err := os.Chmod(filepath.Join(trap, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	host(t, home, "git config --global core.hooksPath '"+trap+"'")
	m := mirrors(t)
	ensure(t, m, ref)
	// First verify that the trap works, then run ours again.
	host(t, bare, "git update-ref refs/heads/probe main")
	if err := os.Remove(filepath.Join(home, "ran")); err != nil {
		t.Fatalf("file of the trap: %v, want it: the trap must work", err)
	}
	ensure(t, m, ref)
	if _, err := os.Stat(filepath.Join(home, "ran")); err == nil {
		t.Error("hook ran during Ensure, want no hook run")
	}
}

func TestEnsureIgnoresTheCallersRepository(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	t.Setenv("GIT_DIR", "/nowhere")
	t.Setenv("GIT_WORK_TREE", "/nowhere")
	t.Setenv("GIT_INDEX_FILE", "/nowhere/index")
	t.Setenv("GIT_OBJECT_DIRECTORY", "/nowhere")
	ensure(t, mirrors(t), ref)
}

func TestEnsureSweepsLeftovers(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	m := mirrors(t)
	left := filepath.Join(m.temporary(ref), "dead")
	write(t, filepath.Join(left, "objects", "pack", "tmp_pack_x"), "half")
	dir, err := m.mirrorDir(ref)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "config"), "half") // without a HEAD: not a mirror
	ensure(t, m, ref)
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("leftover %s after Ensure: %v, want it removed", left, err)
	}
	host(t, dir, "git fsck --strict")
}

func TestEnsureConcurrently(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	m := mirrors(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			mirror, err := m.Ensure(t.Context(), ref, nil)
			if err != nil || mirror.Warning != "" {
				t.Errorf("Ensure = %v, warning %q, want nil, none", err, mirror.Warning)
			}
		})
	}
	wg.Wait()
}

func TestEnsureStopsWaitingForTheLock(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	m := mirrors(t)
	unlock, err := m.lock(t.Context(), ref, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithCancel(t.Context())
	_, err = m.Ensure(ctx, ref, func(string) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Ensure cancelled while waiting for the lock = %v, want %v", err, context.Canceled)
	}
}

func TestEnsureUsesAnOldMirror(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	m := mirrors(t)
	old := ensure(t, m, ref)
	if err := os.Rename(bare, bare+".gone"); err != nil {
		t.Fatal(err)
	}
	got, err := m.Ensure(t.Context(), ref, nil)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "mirror", got.Dir, old.Dir)
	if !strings.Contains(got.Warning, "of the last fetch") {
		t.Errorf("warning of Ensure = %q, want \"of the last fetch\"", got.Warning)
	}
}

func TestEnsureWithoutNetworkForALocalClone(t *testing.T) {
	isolate(t)
	dir := t.TempDir()
	host(t, dir, "git init -q . && git remote add origin https://invalid.invalid/a/b")
	ref, err := Parse(".", dir)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "mirror", ensure(t, mirrors(t), ref), Mirror{Dir: dir, Local: true, Ref: ref})
}

// gitServer serves repositories over https. Each request first calls refuse.
func gitServer(t *testing.T, root string, refuse func(w http.ResponseWriter, r *http.Request) bool) string {
	t.Helper()
	path, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	backend := filepath.Join(strings.TrimSpace(string(path)), "git-http-backend")
	if _, err := os.Stat(backend); err != nil {
		t.Fatalf("%v; install it: apt-get install git", err)
	}
	h := &cgi.Handler{Path: backend, Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1"}}
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !refuse(w, r) {
			h.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(srv.Close)
	t.Setenv("GIT_SSL_NO_VERIFY", "1")
	t.Setenv("NO_PROXY", "127.0.0.1")
	t.Setenv("no_proxy", "127.0.0.1")
	return srv.URL
}

func TestEnsureOverHTTPS(t *testing.T) {
	for name, tc := range map[string]struct {
		status, fails int // status is the response to the first fails requests
		path          string
		delays        []time.Duration
		code          fail.Code
		says          string
	}{
		"at once":       {path: "/owner/project.git"},
		"after trouble": {path: "/owner/project.git", status: 503, fails: 2, delays: []time.Duration{5 * time.Second, 10 * time.Second}},
		"never":         {path: "/owner/project.git", status: 502, fails: 99, delays: []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second}, code: fail.Failure},
		"missing":       {path: "/owner/missing.git", code: fail.NotFound, says: "the repository does not exist"},
		"login":         {path: "/owner/project.git", status: 401, fails: 99, code: fail.Secret, says: "refused the login"},
		"forbidden":     {path: "/owner/project.git", status: 403, fails: 99, code: fail.Secret},
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			_, bare := upstream(t)
			var n atomic.Int64
			url := gitServer(t, filepath.Dir(filepath.Dir(bare)), func(w http.ResponseWriter, _ *http.Request) bool {
				if int(n.Add(1)) > tc.fails {
					return false
				}
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				w.WriteHeader(tc.status)
				return true
			})
			ref, err := Parse(url+tc.path, "/")
			if err != nil {
				t.Fatal(err)
			}
			var delays []time.Duration
			m := &Mirrors{Dir: t.TempDir(), Pauses: (&pauses{each: func(d time.Duration) { delays = append(delays, d) }}).new}
			_, err = m.Ensure(t.Context(), ref, nil)
			equal(t, "delays", fmt.Sprint(delays), fmt.Sprint(tc.delays))
			if tc.code == 0 {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || fail.CodeOf(err) != tc.code || fail.HintOf(err) == "" || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("Ensure = %v (code %v, hint %q), want code %v, %q and a hint", err, fail.CodeOf(err), fail.HintOf(err), tc.code, tc.says)
			}
			if left, _ := filepath.Glob(filepath.Join(m.Dir, ".tmp", "*")); len(left) > 0 {
				t.Errorf("temporary files after Ensure = %q, want none", left)
			}
		})
	}
}

// Credentials that a user's insteadOf puts into a URL never appear in an error.
func TestErrorsHideCredentials(t *testing.T) {
	home := isolate(t)
	url := gitServer(t, t.TempDir(), func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	host(t, home, `git config --global url.`+strings.Replace(url, "://", "://bot:s3cret@", 1)+`/.insteadOf `+url+`/`)
	ref, err := Parse(url+"/a/b", "/")
	if err != nil {
		t.Fatal(err)
	}
	m := &Mirrors{Dir: t.TempDir(), Pauses: noPauses}
	var said strings.Builder
	_, err = m.Ensure(t.Context(), ref, func(s string) { said.WriteString(s + "\n") })
	if err == nil || strings.Contains(err.Error()+said.String(), "s3cret") {
		t.Errorf("Ensure = %v, progress %q, want an error without the password", err, said.String())
	}
	if err == nil || !strings.Contains(err.Error(), "git ls-remote: ") { // without its settings
		t.Errorf("Ensure = %v, want \"git ls-remote: \" without its settings", err)
	}
}

func TestEnsureCanBeCancelled(t *testing.T) {
	isolate(t)
	ctx, cancel := context.WithCancel(t.Context())
	url := gitServer(t, t.TempDir(), func(_ http.ResponseWriter, r *http.Request) bool {
		cancel()
		<-r.Context().Done() // until git has ended
		return true
	})
	ref, err := Parse(url+"/a/b", "/")
	if err != nil {
		t.Fatal(err)
	}
	m := mirrors(t)
	if _, err := m.Ensure(ctx, ref, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled Ensure = %v, want %v", err, context.Canceled)
	}
}

// pauses reports the pauses between fetches, without their random part, and makes none.
type pauses struct {
	backoff.ExponentialBackOff
	each func(time.Duration)
}

func noPauses() backoff.BackOff { return &backoff.ZeroBackOff{} }

func (p *pauses) new() backoff.BackOff { return p }

func (p *pauses) Reset() {
	p.ExponentialBackOff = *fetchPauses().(*backoff.ExponentialBackOff)
	p.RandomizationFactor = 0
	p.ExponentialBackOff.Reset()
}

func (p *pauses) NextBackOff() time.Duration {
	p.each(p.ExponentialBackOff.NextBackOff())
	return 0
}

func TestTransient(t *testing.T) {
	for text, want := range map[string]bool{
		"fatal: unable to access 'https://h/': Could not resolve host: h":                                                  true,
		"ssh: connect to host h port 22: Connection timed out\nfatal: Could not read from remote repository.":              true,
		"error: RPC failed; curl 18 transfer closed\nfatal: early EOF":                                                     true,
		"git@h: Permission denied (publickey).\nfatal: Could not read from remote repository.":                             false,
		"Host key verification failed.\nfatal: Could not read from remote repository.":                                     false,
		"ERROR: Repository not found.\nfatal: Could not read from remote repository.\nthe remote end hung up unexpectedly": false,
		"fatal: could not read Username for 'https://github.com': terminal prompts disabled":                               false,
		"fatal: write error: No space left on device\nfatal: early EOF":                                                    false,
		"fatal: something else": false,
	} {
		equal(t, text, transient(fmt.Errorf("x: %w", &gitError{stderr: text})), want)
	}
}
