package script

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestExamplesOfTheAPI runs the examples of docs/api.md as written, in order and in one
// shell, against a running serve. It replaces the commands that do not end, because they
// run already, as well as the port, the session id, and systemd.
func TestExamplesOfTheAPI(t *testing.T) {
	for _, tool := range []string{"curl", "jq", "git"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%v; install it: apt-get install curl jq git", err)
		}
	}
	text, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	home, vars := apiHome(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Dir, cmd.Env = home, vars
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
		return string(out)
	}
	run("sh", "-euc", `git init -q app && cd app && echo 'test:; @echo tested' >Makefile && git add . && git commit -qm one &&
		git config --global url."file://$HOME/app".insteadOf https://github.com/acme/app.git`)
	run(binary, "open", "-d", "./app")
	id := regexp.MustCompile(`"id": "([0-9a-f]{12})"`).FindStringSubmatch(run(binary, "list", "--json"))
	if id == nil {
		t.Fatal("sessions in list --json = none, want one")
	}

	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // only to find a free port
	if err != nil {
		t.Fatal(err)
	}
	port := fmt.Sprint(l.Addr().(*net.TCPAddr).Port)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	serve := exec.Command(binary, "serve", "--listen", "127.0.0.1:"+port) //nolint:noctx // the cleanup kills it
	serve.Dir, serve.Env = home, vars
	said, err := serve.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = serve.Process.Kill(); _ = serve.Wait() })
	lines := bufio.NewScanner(said)
	for lines.Scan() && !strings.Contains(lines.Text(), "serving on") {
	}
	go func() { // drain later output, which would fill the pipe
		for lines.Scan() {
		}
	}()

	script := "set -eu\n"
	examples := 0
	for line := range strings.Lines(string(text)) {
		line, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		if !ok {
			continue
		}
		examples++
		switch {
		case line == "agent-sessionizer serve" || strings.HasPrefix(line, "agent-sessionizer serve --listen"):
			line = ":"
		case strings.HasPrefix(line, "ID="):
			line = "ID=" + id[1]
		}
		script += strings.ReplaceAll(line, "127.0.0.1:8122", "127.0.0.1:"+port) + "\n"
	}
	if examples < 10 || strings.Contains(script, "…") {
		t.Fatalf("lines of examples = %d, want at least 10, without …:\n%s", examples, script)
	}
	cmd := exec.CommandContext(ctx, "sh", "-xc", script)
	cmd.Dir, cmd.Env = home, vars
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("examples = %v, want nil\n%s", err, out.String())
	}
	unit, err := os.ReadFile(filepath.Join(home, ".config", "systemd", "user", "agent-sessionizer.service"))
	if err != nil || !strings.Contains(string(unit), "[Service]") {
		t.Errorf("unit = %s, %v, want [Service]", unit, err)
	}
	for _, want := range []string{`"accepted":true`, `"state":"running"`, `"tasks":[`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output = %s, want %s in it", out.String(), want)
		}
	}
}

// apiHome returns a home for the examples. Its curl fails on an error response, and its
// systemd does nothing.
func apiHome(t *testing.T) (home string, vars []string) {
	t.Helper()
	home, err := os.MkdirTemp("", "s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		endProcesses(home, syscall.SIGKILL)
		_ = os.RemoveAll(home)
	})
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(home, "bin")
	for _, dir := range []string{bin, filepath.Join(home, ".config", "systemd", "user"), filepath.Join(home, ".config", "agent-sessionizer")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, body := range map[string]string{
		"curl": "exec " + curl + ` -sS --fail-with-body --max-time 60 "$@"`, "systemctl": ":", "loginctl": ":",
	} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+body+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	files := map[string]string{
		filepath.Join(home, "gitconfig"):                                   "[user]\n\tname = Test\n\temail = test@example.invalid\n[init]\n\tdefaultBranch = main\n",
		filepath.Join(home, ".config", "agent-sessionizer", "config.yaml"): "profiles: {small: {}}\n",
	}
	for name, content := range files {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return home, []string{
		"HOME=" + home, "PATH=" + bin + ":" + filepath.Dir(binary) + ":" + os.Getenv("PATH"), "TMUX_TMPDIR=" + home, "GIT_CONFIG_GLOBAL=" + filepath.Join(home, "gitconfig"),
		"AGENT_SESSIONIZER_PREPARE=none", "AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE=1MiB",
	}
}
