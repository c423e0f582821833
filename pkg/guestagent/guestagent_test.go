package guestagent_test

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/secrets"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// fakeGuest is the program itself, working on a directory.
type fakeGuest struct {
	*testing.T
	program, root string
}

func newFakeGuest(t *testing.T) *fakeGuest {
	t.Helper()
	g := &fakeGuest{T: t, program: filepath.Join(t.TempDir(), "agent-guest"), root: t.TempDir()}
	build := exec.Command("go", "build", "-o", g.program, "../../cmd/agent-guest")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build agent-guest: %v: %s", err, out)
	}
	return g
}

// run returns the program's output and exit code.
func (g *fakeGuest) run(stdin string, args ...string) (stdout, stderr string, code int) {
	g.Helper()
	cmd := exec.Command(g.program, args...)
	cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+g.root)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		g.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func (g *fakeGuest) ok(stdin string, args ...string) string {
	g.Helper()
	out, errs, code := g.run(stdin, args...)
	if code != 0 {
		g.Fatalf("agent-guest %s: exit %d: %s", strings.Join(args, " "), code, errs)
	}
	return out
}

func (g *fakeGuest) write(path, text string) {
	g.Helper()
	full := filepath.Join(g.root, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		g.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
		g.Fatal(err)
	}
}

func compiled(t *testing.T, names ...string) string {
	t.Helper()
	p := policy.Default()
	for _, n := range names {
		p.Names = append(p.Names, policy.Rule{Pattern: n, Source: "test"})
	}
	data, err := policy.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// standIn starts a resolver that returns the same address for every name.
func standIn(t *testing.T) string {
	t.Helper()
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	s := &dns.Server{PacketConn: pc, NotifyStartedFunc: func() { close(ready) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, req *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(req)
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: req.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(203, 0, 113, 9)}}
		_ = w.WriteMsg(m)
	})}
	done := make(chan error, 1)
	go func() { done <- s.ActivateAndServe() }()
	<-ready
	t.Cleanup(func() { _ = s.Shutdown(); <-done })
	return pc.LocalAddr().String()
}

func TestFakeGuest(t *testing.T) {
	g := newFakeGuest(t)
	g.write("etc/agent-guest/upstream", standIn(t)+"\n")
	if _, errs, code := g.run("", "status"); code != 3 || !strings.Contains(errs, "is not running") {
		t.Errorf("status before install: exit %d, %q, want exit 3, %q", code, errs, "is not running")
	}
	t.Cleanup(func() { g.run("", "stop") })
	status, err := guestproto.DecodeStatus(strings.NewReader(g.ok(compiled(t, "ok.example"), "install")))
	if err != nil || !status.Ready() || status.Policy.Names != 1 {
		t.Fatalf("install: status %+v, %v, want ready with 1 name", status, err)
	}
	resolve := func(name string) string {
		m := new(dns.Msg)
		m.SetQuestion(name, dns.TypeA)
		reply, _, err := (&dns.Client{Timeout: time.Minute}).ExchangeContext(t.Context(), m, status.DNS.Listen)
		if err != nil {
			t.Fatal(err)
		}
		return dns.RcodeToString[reply.Rcode]
	}
	for _, c := range []struct{ name, want string }{{"ok.example.", "NOERROR"}, {"new.example.", "NXDOMAIN"}} { // the order of the log
		if got := resolve(c.name); got != c.want {
			t.Errorf("resolve(%q) = %s, want %s", c.name, got, c.want)
		}
	}

	// A new policy applies from the next query; a bad one changes nothing.
	again, err := guestproto.DecodeStatus(strings.NewReader(g.ok(compiled(t, "ok.example", "new.example"), "policy")))
	if err != nil || again.Policy.Names != 2 || again.Started != status.Started {
		t.Errorf("policy: status %+v, %v, want 2 names, started %v", again, err, status.Started)
	}
	if got := resolve("new.example."); got != "NOERROR" {
		t.Errorf("resolve(%q) with a new policy = %s, want NOERROR", "new.example.", got)
	}
	for _, bad := range []string{"", "{}", `{"version":2,"mode":"wide","names":[],"ports":[]}`} {
		if _, errs, code := g.run(bad, "policy"); code != 7 || !strings.Contains(errs, "the previous one stays") {
			t.Errorf("policy %q: exit %d, %q, want exit 7, %q", bad, code, errs, "the previous one stays")
		}
	}
	if got := resolve("new.example."); got != "NOERROR" {
		t.Errorf("resolve(%q) after bad policies = %s, want NOERROR", "new.example.", got)
	}
	if reinstalled, err := guestproto.DecodeStatus(strings.NewReader(g.ok(compiled(t, "ok.example"), "install"))); err != nil || reinstalled.Started != status.Started {
		t.Errorf("second install: status %+v, %v, want started %v", reinstalled, err, status.Started)
	}

	var names []string
	for q, err := range guestproto.Queries(strings.NewReader(g.ok("", "log", "--since", "1", "--limit", "2"))) {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, q.Name)
	}
	if got, want := strings.Join(names, " "), "new.example. new.example"; got != want {
		t.Errorf("names in the log = %q, want %q", got, want)
	}
	if _, _, code := g.run("", "bogus"); code != 2 {
		t.Errorf("an unknown command: exit %d, want 2", code)
	}

	// Sequence numbers continue after a restart.
	g.ok("", "stop")
	testenv.WaitFor(t, "the daemon has stopped", func() bool { _, _, code := g.run("", "status"); return code == 3 })
	g.ok(compiled(t, "ok.example"), "install")
	after, err := guestproto.DecodeStatus(strings.NewReader(g.ok("", "status")))
	if err != nil || after.Counters.LastSeq < 4 {
		t.Errorf("status after a restart = %+v, %v, want LastSeq of at least 4", after, err)
	}
}

func TestFollow(t *testing.T) {
	g := newFakeGuest(t)
	line := func(seq string) string {
		return `{"seq":` + seq + `,"time":"2026-01-02T03:04:05Z","name":"n` + seq + `","type":"A","allowed":true}` + "\n"
	}
	g.write("run/agent-guest/queries.jsonl", line("1")+line("2")[:10])
	cmd := exec.CommandContext(t.Context(), g.program, "log", "--follow")
	cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+g.root)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	want := int64(1)
	for q, err := range guestproto.Queries(out) {
		if err != nil || q.Seq != want {
			t.Fatalf("followed query = %+v, %v, want Seq %d", q, err, want)
		}
		switch want++; want {
		case 2:
			f, err := os.OpenFile(filepath.Join(g.root, "run/agent-guest/queries.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteString(line("2")[10:]); err != nil {
				t.Fatal(err)
			}
			f.Close()
		case 3: // the files rotate
			if err := os.Rename(filepath.Join(g.root, "run/agent-guest/queries.jsonl"), filepath.Join(g.root, "run/agent-guest/queries.1.jsonl")); err != nil {
				t.Fatal(err)
			}
			g.write("run/agent-guest/queries.jsonl", line("3"))
		case 4:
			return
		}
	}
}

func TestSecrets(t *testing.T) {
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	nasty := "it's \"$HOME\" `id` \\ \n second line\n"
	set := guestproto.Secrets{Env: map[string]string{"KEY": nasty, "EMPTY": "", "HUGE": strings.Repeat("x", guestproto.MaxSecretBytes), "GITHUB_TOKEN": "ghp_1\n"}, Token: "session"}
	deliver(t, g, set)
	dir := filepath.Join(g.Root, sys.SecretDir)
	if b, err := os.ReadFile(filepath.Join(dir, "secrets/HUGE")); err != nil || len(b) != guestproto.MaxSecretBytes {
		t.Errorf("ReadFile(secrets/HUGE) = %d bytes, %v, want %d", len(b), err, guestproto.MaxSecretBytes)
	}
	out, err := exec.Command("sh", "-ec", `. "$1/env"; printf %s "$KEY"; test -z "$EMPTY" -a -z "$HUGE"; ls / >/dev/null`, "sh", dir).Output()
	if err != nil || string(out) != nasty {
		t.Errorf("a shell reads KEY = %q, %v, want %q", out, err, nasty)
	}
	for _, name := range []string{"env", "token", "secrets/KEY"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		} else if got := info.Mode().Perm(); got != 0o600 {
			t.Errorf("mode of %s = %v, want %v", name, got, os.FileMode(0o600))
		}
	}

	var answer bytes.Buffer
	for _, q := range []string{"protocol=https\nhost=github.com\n\n", "protocol=http\nhost=github.com\n", "protocol=https\nhost=github.com:8443\n", "protocol=https\nhost=github.com.evil.com\n", ""} {
		if err := secrets.Credential(g, "get", strings.NewReader(q), &answer); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := answer.String(), "username=x-access-token\npassword=ghp_1\n"; got != want {
		t.Errorf("credential helper printed %q, want %q", got, want)
	}

	// The next set replaces this one completely.
	deliver(t, g, guestproto.Secrets{Env: map[string]string{"OTHER": "1"}})
	if _, err := os.Stat(filepath.Join(dir, "secrets/KEY")); err == nil {
		t.Error("secrets/KEY exists after the next set, want it removed")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 5 {
		t.Errorf("ReadDir(%s) = %v, %v, want 5 entries", dir, entries, err)
	}
	for range 2 {
		if err := secrets.Wipe(g); err != nil {
			t.Fatal(err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("ReadDir(%s) after the wipe = %v, %v, want none", dir, entries, err)
	}
}

func TestSecretsRefused(t *testing.T) {
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	for _, env := range []map[string]string{{"lower": "hunter2"}, {"../X": "hunter2"}, {"1A": "hunter2"}, {"": "hunter2"}, {"A": "hunter2\x00"}} {
		var b bytes.Buffer
		if err := (guestproto.Secrets{Env: env}).Encode(&b); err != nil {
			t.Fatal(err)
		}
		if err := secrets.Set(g, &b); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("secrets.Set(%v): error %v, want one that does not contain the secret", env, err)
		}
	}
	// Except in a fake guest, secrets may only be in memory.
	real := sys.Guest{Root: t.TempDir()}
	if err := os.MkdirAll(filepath.Join(real.Root, sys.SecretDir), 0o700); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := (guestproto.Secrets{}).Encode(&b); err != nil {
		t.Fatal(err)
	}
	if err := secrets.Set(real, &b); err == nil && !onTmpfs(t) {
		t.Error("SetSecrets to a disk succeeded, want an error")
	}
}

// onTmpfs reports whether the tests' temporary directory is in memory.
func onTmpfs(t *testing.T) bool {
	t.Helper()
	out, err := exec.Command("stat", "-f", "-c", "%T", os.TempDir()).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out)) == "tmpfs"
}

func deliver(t *testing.T, g sys.Guest, set guestproto.Secrets) {
	t.Helper()
	var b bytes.Buffer
	if err := set.Encode(&b); err != nil {
		t.Fatal(err)
	}
	if err := secrets.Set(g, &b); err != nil {
		t.Fatal(err)
	}
}

func TestVersionIsJSONFree(t *testing.T) {
	var out bytes.Buffer
	if code := guestagent.Main("v1.2.3", []string{"version"}, nil, &out, &out); code != 0 || out.String() != "v1.2.3\n" || json.Valid(out.Bytes()) {
		t.Errorf("version: exit %d, printed %q, want 0, %q", code, out.String(), "v1.2.3\n")
	}
}
