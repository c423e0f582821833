//go:build bench

package bench

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
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// longest limits waits for events that must happen, however slow the machine is.
const longest = 5 * time.Minute

// farm is a user's account where `serve` runs. The VMs are fake; everything else is
// the real program.
type farm struct {
	*realvm.Box
	t       *testing.T
	program string
	serve   *exec.Cmd
	log     bytes.Buffer
	client  *http.Client
}

// fakes builds the program with fake VMs.
func fakes(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "agent-sessionizer")
	if err := realvm.Build(t.Context(), program, "../../cmd/agent-sessionizer", "-tags=fakevm"); err != nil {
		t.Fatal(err)
	}
	return program
}

// newFarm starts serve in its own account, and waits until it answers.
func newFarm(t *testing.T, program string, env ...string) *farm {
	t.Helper()
	return newFarmWith(t, program, []string{"serve"}, env...)
}

func newFarmWith(t *testing.T, program string, serve []string, env ...string) *farm {
	t.Helper()
	f := &farm{Box: realvm.NewBox(t), t: t, program: program}
	f.Env = append(f.Env, "AGENT_SESSIONIZER_IMAGE=ubuntu", "AGENT_SESSIONIZER_PREPARE=none",
		"AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_RUNNING=100")
	f.Env = append(f.Env, env...)
	f.client = &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: submitters,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(f.state(), "serve.sock"))
		},
	}}
	f.serve = exec.Command(program, serve...)
	f.serve.Dir, f.serve.Env, f.serve.Stdout, f.serve.Stderr = f.Home, f.Env, &f.log, &f.log
	if err := f.serve.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.stop)
	for end := time.Now().Add(longest); ; time.Sleep(5 * time.Millisecond) { // a missing socket offers nothing to wait on
		resp, err := f.client.Get("http://localhost/api/health")
		if err == nil {
			_ = resp.Body.Close()
			return f
		}
		if time.Now().After(end) {
			t.Fatalf("serve = %v, want an answer\n%s", err, f.log.String())
		}
	}
}

func (f *farm) state() string { return filepath.Join(f.Home, ".local/state/agent-sessionizer") }

// stop ends serve, which must exit successfully. It may be called twice.
func (f *farm) stop() {
	f.client.CloseIdleConnections()
	if f.serve.ProcessState != nil {
		return
	}
	_ = f.serve.Process.Signal(syscall.SIGTERM) // Wait reports a process that is gone
	if err := f.serve.Wait(); err != nil {
		f.t.Errorf("serve = %v, want nil\n%s", err, f.log.String())
	}
}

// get reads an answer that must be a success.
func (f *farm) get(path string, into any) error {
	resp, err := f.client.Get("http://localhost" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s: %s", path, resp.Status, body)
	}
	return json.Unmarshal(body, into)
}

// submitted holds the tasks' ids in the order of acceptance, and the time until each
// was accepted, in milliseconds.
type submitted struct {
	ids  []string
	took series
}

// submit submits n tasks from this many clients, each client one after another.
func (f *farm) submit(n, clients int, manifest string) (s submitted) {
	f.t.Helper()
	var mu sync.Mutex
	var all sync.WaitGroup
	left := make(chan struct{}, n)
	for range n {
		left <- struct{}{}
	}
	close(left)
	for range clients {
		all.Go(func() {
			for range left {
				began := time.Now()
				id, err := f.post(manifest)
				took := since(began)
				if err != nil {
					f.t.Error(err)
					return
				}
				mu.Lock()
				s.ids, s.took = append(s.ids, id), append(s.took, took)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	slices.Sort(s.took)
	if once := slices.Compact(slices.Sorted(slices.Values(s.ids))); len(once) != n {
		f.t.Fatalf("tasks accepted = %d, want %d", len(once), n)
	}
	return s
}

func (f *farm) post(manifest string) (id string, err error) {
	resp, err := f.client.Post("http://localhost/api/v1/tasks", "application/json", strings.NewReader(manifest))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var made struct{ ID string }
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusAccepted {
		err = fmt.Errorf("submit: %s: %s", resp.Status, body)
	}
	return made.ID, errors.Join(err, json.Unmarshal(body, &made))
}

func since(began time.Time) float64 { return float64(time.Since(began)) / float64(time.Millisecond) }

// at returns the quantile share of a sorted series.
func (s series) at(share float64) float64 { return s[min(int(share*float64(len(s))), len(s)-1)] }

// mostResident returns the most memory that a process ever had, including the
// program's own pages, in MB.
func mostResident(t *testing.T, pid int) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	if err != nil {
		t.Fatal(err)
	}
	return kb / 1000
}
