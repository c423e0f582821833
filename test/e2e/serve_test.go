//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// background is a command that runs while the test does something else.
type background struct {
	*exec.Cmd
	out, errs bytes.Buffer
}

func (b *box) start(args ...string) *background {
	b.t.Helper()
	c := &background{Cmd: exec.Command(realvm.Binary(), args...)}
	c.Env, c.Dir, c.Stdout, c.Stderr = b.Env, b.Home, &c.out, &c.errs
	if err := c.Start(); err != nil {
		b.t.Fatal(err)
	}
	return c
}

// ends checks that the command succeeds.
func (c *background) ends(t *testing.T) {
	t.Helper()
	if err := c.Wait(); err != nil {
		t.Errorf("%v = %v, want nil\n%s%s", c.Args, err, c.out.String(), c.errs.String())
	}
}

// api sends a request to the box's serve.
func (b *box) api(path string, header ...string) (*http.Response, error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(b.Home, ".local/state/agent-sessionizer/serve.sock"))
	}}}
	req, err := http.NewRequest(http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return client.Do(req)
}

// serve starts serve, and waits until it answers.
func (b *box) serve() *background {
	b.t.Helper()
	c := b.start("serve")
	testenv.WaitFor(b.t, "an answer of serve", func() bool {
		resp, err := b.api("/api/health")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return c
}

// reader is a client of two streams of a task, its events and its output. When they
// break off, join continues where they ended.
type reader struct {
	b    *box
	id   string
	open sync.WaitGroup

	mu     sync.Mutex
	events []string // their ids
	over   bool     // whether the last event was announced as the last
	output []byte
}

func (r *reader) join() {
	r.b.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	header := []string{"Accept", "text/event-stream"}
	if n := len(r.events); n > 0 {
		header = append(header, "Last-Event-ID", r.events[n-1])
	}
	events, err := r.b.api("/api/v1/tasks/"+r.id+"/events", header...)
	if err != nil || events.StatusCode != http.StatusOK {
		r.b.t.Fatalf("GET events = %+v, %v, want status %d", events, err, http.StatusOK)
	}
	output, err := r.b.api(fmt.Sprintf("/api/v1/tasks/%s/logs?follow=true&offset=%d", r.id, len(r.output)))
	if err != nil || output.StatusCode != http.StatusOK {
		r.b.t.Fatalf("GET logs = %+v, %v, want status %d", output, err, http.StatusOK)
	}
	r.open.Go(func() {
		defer events.Body.Close()
		for lines := bufio.NewScanner(events.Body); lines.Scan(); {
			r.mu.Lock()
			if id, ok := strings.CutPrefix(lines.Text(), "id: "); ok {
				r.events = append(r.events, id)
			}
			r.over = r.over || lines.Text() == "event: end"
			r.mu.Unlock()
		}
	})
	r.open.Go(func() {
		defer output.Body.Close()
		buf := make([]byte, 4096)
		for {
			n, err := output.Body.Read(buf)
			r.mu.Lock()
			r.output = append(r.output, buf[:n]...)
			r.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
}

// has returns how many bytes of output arrived.
func (r *reader) has() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.output)
}

// TestServe ends and stops serve, which must not affect the tasks.
func TestServe(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.Repo("project")

	t.Run("killed and stopped under a task", func(t *testing.T) { serveKilled(t, b) })

	t.Run("a unit", func(t *testing.T) {
		long(t)
		serveUnit(t, b)
	})
}

// serveKilled kills and stops serve while a task runs and its streams are read.
func serveKilled(t *testing.T, b *box) {
	b.manifest(shell(`until [ -e /tmp/go ]; do echo "line $((++n))"; sleep 0.2; done; echo over`), "")
	run := b.start("task", "run", "-f", "task.yaml")
	var all []taskView
	testenv.WaitFor(t, "a task", func() bool {
		return json.Unmarshal([]byte(b.Asz("task", "list", "--json")), &all) == nil && len(all) == 1
	})
	id := all[0].ID
	logs := b.start("task", "logs", "-f", id)
	printed := func() int {
		text, _ := os.ReadFile(filepath.Join(b.taskDir(id), "outbox", "progress", "stdout.log"))
		return len(text)
	}
	grows := func(what string, size func() int) {
		t.Helper()
		testenv.WaitFor(t, what, func(before int) func() bool { return func() bool { return size() > before } }(size()+20))
	}

	serve := b.serve()
	r := &reader{b: b, id: id}
	r.join()
	b.until(id, "RUNNING")
	grows("output in the stream", r.has)

	// Killed: its streams break off, and continue with the next serve.
	if err := serve.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = serve.Wait() // it was killed
	r.open.Wait()
	grows("output without serve", printed)
	serve = b.serve()
	r.join()
	grows("output in the stream of another serve", r.has)

	// Stopped: they pause, and lose nothing.
	if err := serve.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	grows("output while serve is stopped", printed)
	if err := serve.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	grows("output after serve continues", r.has)

	// Killed again, and the task ends before the next serve starts.
	if err := serve.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = serve.Wait() // it was killed
	r.open.Wait()
	b.MustIn(b.List()[0].Name, "touch /tmp/go")
	run.ends(t)
	logs.ends(t)
	if v := b.task(id); v.State != "COMPLETED" || v.Attempt != 1 {
		t.Errorf("task = %+v, want COMPLETED in attempt 1", v)
	}
	serve = b.serve()
	r.join()
	r.open.Wait()

	var page struct{ Newest int }
	resp, err := b.api("/api/v1/tasks/" + id + "/events?after=newest")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&page); err != nil || page.Newest != len(r.events) || !r.over {
		t.Errorf("events read = %d, %v, stream over: %t, want %d, true", len(r.events), err, r.over, page.Newest)
	}
	for i, ev := range r.events {
		if ev != fmt.Sprintf("%s/%d", id, i+1) {
			t.Fatalf("event %d = %s, want %s/%d", i+1, ev, id, i+1)
		}
	}
	log := b.Asz("task", "logs", id)
	if string(r.output) != log || logs.out.String() != log || !strings.HasSuffix(log, "over\n") {
		t.Errorf("log = %d bytes, stream %d, logs -f %d, want the same, with \"over\" last", len(log), len(r.output), logs.out.Len())
	}
	if err := serve.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	serve.ends(t)
	b.nothingLeft()
}

// serveUnit runs serve as a unit of systemd, with its watchdog, in a guest.
func serveUnit(t *testing.T, b *box) {
	// Each guest has a systemd. The VMs of what runs there are fake; they only
	// have to outlive serve.
	b.pack("agent-sessionizer.gz")
	name := b.open("./project")
	b.Asz("cp", "agent-sessionizer.gz", name+":/home/agent/")
	const with = "export XDG_RUNTIME_DIR=/run/user/$(id -u); s=~/.local/state/agent-sessionizer; show() { systemctl --user show -P $1 agent-sessionizer; }; "
	in := func(line string) string { t.Helper(); return b.MustIn(name, with+line) }
	// Each request from here is a login, which is slow for an emulated guest.
	until := func(what, ok string) {
		t.Helper()
		if r := b.In(name, with+"for i in $(seq 600); do if "+ok+"; then exit 0; fi; sleep 1; done; sudo journalctl --no-pager -n 50; exit 1"); r.Code != 0 {
			t.Fatalf("%s: not in time\n%s", what, r.All())
		}
	}
	// Logins in a guest have no manager for the user's units, and the guest has
	// less capacity than the host.
	in(`set -e
gunzip <~/agent-sessionizer.gz >/tmp/program; sudo install /tmp/program /usr/local/bin/agent-sessionizer; rm /tmp/program
mkdir -p ~/.config/systemd/user/agent-sessionizer.service.d
cat >~/.config/systemd/user/agent-sessionizer.service.d/test.conf <<E
[Service]
WatchdogSec=10
Environment=AGENT_SESSIONIZER_PREPARE=none AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1MiB AGENT_SESSIONIZER_LIMITS_DISK_RESERVE=1MiB
E
agent-sessionizer serve unit >~/.config/systemd/user/agent-sessionizer.service
sudo mkdir -p /etc/systemd/system/user@.service.d
printf '[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%%i\n' | sudo tee /etc/systemd/system/user@.service.d/test.conf
sudo systemctl daemon-reload; sudo systemctl start user@$(id -u)`)

	// It counts as started only when it answers.
	const get = "curl -sS --fail-with-body --unix-socket $s/serve.sock http://localhost"
	if got := in("systemctl --user enable --now agent-sessionizer 2>/dev/null; " + get + "/api/health | jq -r .status; show Type; show ActiveState"); got != "ok\nnotify\nactive" {
		t.Errorf("service after its start = %s, want ok, notify, active", got)
	}
	// While it answers itself, it notifies systemd; when it does not, systemd
	// restarts it.
	until("word to the watchdog", "fed=${fed:-$(show WatchdogTimestampMonotonic)}; [ $fed != $(show WatchdogTimestampMonotonic) ]")
	until("another serve", "if [ -z $pid ]; then pid=$(show MainPID); kill -STOP $pid; fi; [ $(show MainPID) != $pid ] && [ $(show ActiveState) = active ]")
	if got := in("sudo journalctl --no-pager | grep 'Watchdog timeout'; show NRestarts"); !strings.Contains(got, "agent-sessionizer.service") || strings.HasSuffix(got, "\n0") {
		t.Errorf("restart = %s, want one by the watchdog", got)
	}

	id := in(`systemctl --user service-watchdogs no # a slow machine must not end what follows
cat >/tmp/task.yaml <<E
version: "1"
kind: Task
repository: {url: $PWD}
vm: {cpus: 1, memory: 512M, disk: 4G}
agent: {kind: command, command: [sh, -c, "echo up; until [ -e /tmp/go ]; do sleep 1; done; echo over"]}
E
` + get + `/api/v1/tasks -H 'Content-Type: application/yaml' --data-binary @/tmp/task.yaml | jq -r .id`)
	state := "grep -qE '\"state\": \"(%s|FAILED)\"' $s/tasks/" + id + "/state.json"
	until("the task", fmt.Sprintf(state, "RUNNING"))

	// It ends without errors, and without the keepers, which are in its cgroup.
	const keepers = "pgrep -f 'agent-sessionizer [a-z-]*keeper ' | xargs; " // the pattern does not match this command itself
	before, after, _ := strings.Cut(in(keepers+"systemctl --user stop agent-sessionizer; "+keepers+"show ActiveState; show Result; show ExecMainStatus"), "\n")
	if len(strings.Fields(before)) != 2 || after != before+"\ninactive\nsuccess\n0" {
		t.Errorf("keepers before the stop = %s, after it with the service's state = %s, want the same 2, inactive with success", before, after)
	}
	in("touch /tmp/go")
	until("the end of the task", fmt.Sprintf(state, "COMPLETED"))
	var v taskView
	if got := in("systemctl --user start agent-sessionizer; " + get + "/api/v1/tasks/" + id); json.Unmarshal([]byte(got), &v) != nil || v.State != "COMPLETED" || v.Attempt != 1 {
		t.Errorf("task by another serve = %s, want COMPLETED in attempt 1", got)
	}
	if got := in(get + "/api/v1/tasks/" + id + "/logs"); got != "up\nover" {
		t.Errorf("log by another serve = %q, want \"up\\nover\"", got)
	}
	b.Asz("destroy", "--force", name)
	b.nothingLeft()
}

// pack builds the program with fake VMs, small enough for an emulated network.
func (b *box) pack(name string) {
	b.t.Helper()
	program := filepath.Join(b.Home, "program")
	cmd := exec.Command("go", "build", "-tags", "fakevm", "-ldflags", "-s -w", "-o", program, "../../cmd/agent-sessionizer")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Fatalf("build the program: %v\n%s", err, out)
	}
	defer os.Remove(program)
	from, err := os.Open(program)
	if err != nil {
		b.t.Fatal(err)
	}
	defer from.Close()
	to, err := os.Create(filepath.Join(b.Home, name))
	if err != nil {
		b.t.Fatal(err)
	}
	defer to.Close()
	z := gzip.NewWriter(to)
	if _, err := io.Copy(z, from); err != nil {
		b.t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		b.t.Fatal(err)
	}
}
