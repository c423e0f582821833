//go:build e2e

package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestSession covers the main use: one VM from its creation to its removal. The parts
// run in order and share the VM, because a boot under emulation costs half a minute.
func TestSession(t *testing.T) {
	b := newBox(t)
	clone := b.Repo("project")
	b.Write("project/draft.txt", "not committed\n")
	sentinel := "sentinel-" + random() + "-end"
	b.Write("secret-file", sentinel)
	multi := "line one " + random() + "\nline 'two' \"$x\"\n"
	b.Write("multi-file", multi)
	for name, text := range ownFiles {
		b.dotfile(name, text)
	}
	b.Write(".config/agent-sessionizer/config.yaml", `
persist: [agent, .zsh_history]
record: on
network: {ask: [asked.example, refused.example]}
secrets:
  SENTINEL: {from: "file:`+b.Home+`/secret-file", guest: true}
  MULTI: {from: "file:`+b.Home+`/multi-file", guest: true}
  GITHUB_TOKEN: "cmd:printf ghp_%s `+random()+`"
`)
	watch := watchCmdlines(t, sentinel)
	name := b.open("--with-changes", "./project")

	t.Run("a VM of its own", func(t *testing.T) { checkIsolation(t, b, name) })
	t.Run("tools", func(t *testing.T) { checkTools(t, b, name) })
	t.Run("repository", func(t *testing.T) { checkRepository(t, b, name) })
	t.Run("tmux windows", func(t *testing.T) {
		if got := b.MustIn(name, "tmux list-windows -t agent -F '#W' | paste -sd' '"); got != "vim server claude git scratch" {
			t.Errorf("windows = %q, want \"vim server claude git scratch\"", got)
		}
	})
	t.Run("names", func(t *testing.T) { names(t, b, name) })
	t.Run("questions about the network", func(t *testing.T) { askedNames(t, b, name) })
	t.Run("addresses and ports", func(t *testing.T) { addresses(t, b, name) })
	t.Run("ports and host services", func(t *testing.T) { services(t, b, name) })
	t.Run("the guest firewall survives a restart of docker", func(t *testing.T) {
		b.MustIn(name, "sudo systemctl restart docker && sleep 6")
		addresses(t, b, name)
	})
	t.Run("secrets", func(t *testing.T) { checkSecrets(t, b, name, sentinel, multi) })
	t.Run("report of a problem", func(t *testing.T) { report(t, b, name) })
	t.Run("dotfiles", func(t *testing.T) { dotfiles(t, b, name) })
	t.Run("copy", func(t *testing.T) { copyFiles(t, b, name) })
	t.Run("OpenSSH", func(t *testing.T) { logInWithOpenSSH(t, b, name) })
	t.Run("editors", func(t *testing.T) { editors(t, b, name) })
	t.Run("attach", func(t *testing.T) { attach(t, b, name) })
	t.Run("recordings", func(t *testing.T) { recordWindows(t, b, name, sentinel) })
	t.Run("from another host", func(t *testing.T) { fromAnotherHost(t, b, name) })
	t.Run("fetch", func(t *testing.T) { work(t, b, name, clone) })
	t.Run("review", func(t *testing.T) { reviewWork(t, b, name, clone) })
	t.Run("stop and start", func(t *testing.T) { restartVM(t, b, name, sentinel, watch) })
	t.Run("destroy", func(t *testing.T) { destroySession(t, b, name, sentinel, clone) })
	t.Run("recordings after the end", func(t *testing.T) { recordingsAfterDestroy(t, b) })
	searchHome(t, b, sentinel, "secret-file")
}

// checkIsolation checks that the guest shares no kernel, mount or SSH agent with the host.
func checkIsolation(t *testing.T, b *box, name string) {
	if host, guest := kernel(t), b.MustIn(name, "uname -r"); host == guest {
		t.Errorf("kernel of the guest = %s, want another than the host's", guest)
	}
	if m := b.In(name, "findmnt -rn -t 9p,virtiofs,fuse.sshfs,nfs"); m.Stdout != "" {
		t.Errorf("mounts of the host in the guest = %s, want none", m.Stdout)
	}
	if env := b.MustIn(name, "env"); strings.Contains(env, "SSH_AUTH_SOCK") {
		t.Error("environment in the guest = SSH_AUTH_SOCK set, want no SSH agent of the host")
	}
	if cpus := b.MustIn(name, "nproc"); cpus != "2" {
		t.Errorf("CPUs = %s, want 2", cpus)
	}
	if ports := b.MustIn(name, "cat /etc/machine-id; hostname"); !strings.Contains(ports, name) {
		t.Errorf("hostname = %s, want %s", ports, name)
	}
}

// checkTools checks that the programs of the image are installed.
func checkTools(t *testing.T, b *box, name string) {
	for _, tool := range []string{"git", "vim", "tmux", "zsh", "docker", "node", "npm", "gh", "claude", "jq"} {
		if r := b.In(name, "command -v "+tool); r.Code != 0 {
			t.Errorf("command -v %s = exit %d, want it installed", tool, r.Code)
		}
	}
	if r := b.In(name, "claude --version"); r.Code != 0 || !strings.Contains(r.Stdout, "Claude Code") {
		t.Errorf("claude --version = %s, want Claude Code", r.All())
	}
	if r := b.In(name, "docker compose version || docker-compose version"); r.Code != 0 {
		t.Errorf("docker compose version = %s, want exit 0", r.All())
	}
}

// checkRepository checks the history and the work tree in the guest.
func checkRepository(t *testing.T, b *box, name string) {
	if got := b.MustIn(name, "git log --format=%s | tr '\\n' ' '; git branch --show-current"); got != "hello first main" {
		t.Errorf("history = %q, want \"hello first main\"", got)
	}
	if got := b.MustIn(name, "cat hello.txt draft.txt; git status --porcelain"); got != "hello\nnot committed\n?? draft.txt" {
		t.Errorf("work tree = %q, want hello, and draft.txt not committed", got)
	}
}

// checkSecrets checks where the secrets are, and where they are not.
func checkSecrets(t *testing.T, b *box, name, sentinel, multi string) {
	if got := b.MustIn(name, `printf %s "$SENTINEL"`); got != sentinel {
		t.Error("SENTINEL in the agent's environment is not the secret, want the secret")
	}
	if got := b.In(name, `printf '%s' "$MULTI"`); got.Stdout != multi {
		t.Errorf("MULTI = %q, want %q", got.Stdout, multi)
	}
	for _, shell := range []string{"zsh -c", "zsh -ic", "bash -lc", "bash -ic"} {
		if r := b.In(name, shell+` 'printf %s "$SENTINEL"'`); !strings.Contains(r.Stdout, sentinel) {
			t.Errorf("SENTINEL in %s = %q, want the secret", shell, r.All())
		}
	}
	if got := b.MustIn(name, "stat -L -c '%a %U' /run/agent /run/agent/env; stat -f -c %T /run/agent"); got != "700 agent\n600 agent\ntmpfs" {
		t.Errorf("modes of /run/agent = %q, want 700 and 600 of agent on tmpfs", got)
	}
	cred := b.MustIn(name, `printf 'protocol=https\nhost=github.com\n\n' | git credential fill`)
	if !strings.Contains(cred, "password=ghp_") {
		t.Errorf("git credential fill = %q, want the GitHub token", cred)
	}
	if other := b.In(name, `printf 'protocol=https\nhost=evil.example\n\n' | GIT_TERMINAL_PROMPT=0 git credential fill`); strings.Contains(other.All(), "ghp_") {
		t.Error("git credential fill for another host = a GitHub token, want none")
	}
	if out := b.Asz("secrets", "list", "--json") + b.Asz("config", "show") + b.Asz("logs", name); strings.Contains(out, sentinel) {
		t.Error("output of secrets list, config show and logs = the secret, want it hidden")
	}
}

// report makes an archive for the report of a problem, and checks that it has what the guest and its
// gateway wrote, without a secret.
func report(t *testing.T, b *box, name string) {
	b.MustIn(name, `echo "$(echo "$MULTI" | head -n 1) marked-by-the-guest" | sudo tee /dev/ttyS0 >/dev/null`)
	b.Asz("diagnose", name, "--yes", "--output", filepath.Join(b.Home, "report.tar.gz"))
	if r := b.Run("tar", "-xzf", "report.tar.gz", "--one-top-level=report", "--strip-components=1"); r.Code != 0 {
		t.Fatalf("tar = %s", r.All())
	}
	for file, want := range map[string]string{
		"session/serial.log": "[redacted] marked-by-the-guest", "session/decisions.jsonl": "evil.example", "session/lima.yaml": "images:",
		"session/events.jsonl": "ready", "session/ha.stderr.log": "level", "versions.txt": "qemu", "doctor.json": "tmux",
	} {
		if text, err := os.ReadFile(filepath.Join(b.Home, "report", file)); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s of the report lacks %q (%v)", file, want, err)
		}
	}
}

// copyFiles copies files into the guest and out of it.
func copyFiles(t *testing.T, b *box, name string) {
	b.Write("in.txt", "copied\n")
	b.Asz("cp", "in.txt", name+":sub-in.txt")
	if got := b.MustIn(name, "cat sub-in.txt; rm sub-in.txt"); got != "copied" {
		t.Errorf("file copied in = %q, want \"copied\"", got)
	}
	b.MustIn(name, "mkdir -p /tmp/out/deep && echo result >/tmp/out/deep/r.txt && ln -s /etc/passwd /tmp/out/link")
	b.Run("agent-sessionizer", "cp", name+":/tmp/out", "out")
	if text, err := os.ReadFile(filepath.Join(b.Home, "out/deep/r.txt")); err != nil || string(text) != "result\n" {
		t.Errorf("file copied out = %q, %v, want \"result\\n\"", text, err)
	}
	if _, err := os.Lstat(filepath.Join(b.Home, "out/link")); err == nil {
		t.Error("link copied out of the guest exists, want it left out")
	}
}

// logInWithOpenSSH logs in with the generated configuration.
func logInWithOpenSSH(t *testing.T, b *box, name string) {
	b.Write("ssh.config", b.Asz("ssh-config", name))
	r := b.Run("ssh", "-F", filepath.Join(b.Home, "ssh.config"), name, "echo", "hello from", "$USER")
	if r.Stdout != "hello from agent\n" {
		t.Errorf("ssh with the generated configuration = %s, want \"hello from agent\"", r.All())
	}
}

// restartVM searches the disk of the stopped VM, and checks what stays after the next
// boot.
func restartVM(t *testing.T, b *box, name, sentinel string, watch *cmdlines) {
	before := b.MustIn(name, "cat /etc/machine-id; ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub | cut -d' ' -f2")
	b.Asz("stop", name)
	if got := b.List()[0].State; got != "stopped" {
		t.Errorf("state = %q, want \"stopped\"", got)
	}
	if left := b.Processes("qemu"); len(left) > 0 {
		t.Errorf("QEMU processes after the stop = %v, want none", left)
	}
	watch.check(t)
	searchDisk(t, b, name, sentinel)
	b.Asz("start", name)
	if after := b.MustIn(name, "cat /etc/machine-id; ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub | cut -d' ' -f2"); after != before {
		t.Errorf("identity after a restart = %s, want %s", after, before)
	}
	if got := b.MustIn(name, `cat hello.txt; printf %s "$SENTINEL"`); !strings.HasSuffix(got, sentinel) {
		t.Error("SENTINEL after a restart is not the secret, want the secret")
	}
	editorsAfterRestart(t, b, name)
	dotfilesAfterRestart(t, b, name)
	names(t, b, name)
}

// destroySession removes the session and checks that nothing is left of it.
func destroySession(t *testing.T, b *box, name, sentinel, clone string) {
	writeHomeFiles(b, name)
	b.MustIn(name, "echo precious >precious.txt")
	b.Fails(4, "would lose work", "destroy", name)
	b.Asz("destroy", "--force", name)
	b.Asz("destroy", name)
	if l := b.List(); len(l) != 0 {
		t.Errorf("sessions at the end = %+v, want none", l)
	}
	if left := b.Leftovers(); len(left) > 0 {
		t.Errorf("processes at the end = %v, want none", left)
	}
	homeAfterDestroy(t, b, sentinel, clone)
	for _, glob := range []string{".agent-vms/agent-*", ".agent-vms/_disks/*", ".local/state/agent-sessionizer/sessions/*"} {
		if left, _ := filepath.Glob(filepath.Join(b.Home, glob)); len(left) > 0 {
			t.Errorf("files for %s at the end = %v, want none", glob, left)
		}
	}
	if r := b.Run("tmux", "list-sessions"); strings.Contains(r.Stdout, "project") {
		t.Errorf("local tmux sessions at the end = %s, want none of project", r.Stdout)
	}
}

func names(t *testing.T, b *box, session string) {
	t.Helper()
	name := session
	if got := b.MustIn(name, "getent ahostsv4 github.com | head -n1 | cut -d' ' -f1"); !strings.HasPrefix(got, "198.18.") && !strings.HasPrefix(got, "198.19.") {
		t.Errorf("address of github.com = %q, want one made by the gateway", got)
	}
	if got := b.MustIn(name, "curl -sS http://github.com/"); got != "this is "+allowedAddr+":80" {
		t.Errorf("http://github.com/ = %q, want %s:80", got, allowedAddr)
	}
	before := hitCount("dns evil.example.")
	for _, line := range []string{
		"getent ahostsv4 evil.example",
		"getent ahostsv4 github.com.evil.example",
		"sudo getent ahostsv4 evil.example",
	} {
		if r := b.In(name, line); r.Code == 0 {
			t.Errorf("%s = %s, want it denied", line, r.Stdout)
		}
	}
	if after := hitCount("dns evil.example."); after != before {
		t.Errorf("upstream queries for a denied name = %d, want %d as before", after, before)
	}
	// A resolver of the guest's own choice still ends at the proxy.
	r := b.In(name, `command -v dig >/dev/null && dig +short +tries=1 +time=3 @`+resolverAddr+` evil.example || python3 - <<'EOF'
import socket
q=b'\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04evil\x07example\x00\x00\x01\x00\x01'
s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); s.settimeout(3)
s.sendto(q,('`+resolverAddr+`',53))
d=s.recv(512)
print('rcode',d[3]&15,'answers',d[7])
EOF`)
	if !strings.Contains(r.Stdout, "rcode 3 answers 0") && strings.TrimSpace(r.Stdout) != "" {
		t.Errorf("query to a foreign resolver = %s, want no answer", r.All())
	}
	if got := b.In(name, "getent ahostsv4 rebind.github.com"); strings.Contains(got.Stdout, lanAddr) {
		t.Errorf("addresses of rebind.github.com = %s, want no %s", got.Stdout, lanAddr)
	}
	// allowed immediately, and visible in the log
	if r := b.In(name, "getent ahostsv4 files.example"); r.Code == 0 && hitCount("allowed files.example") == 0 {
		t.Errorf("addresses of files.example before it is allowed = %s, want none", r.Stdout)
	}
	if denied := b.Asz("net", "denied", name, "--json"); !strings.Contains(denied, `"evil.example"`) {
		t.Errorf("net denied = %s, want evil.example", denied)
	}
	b.Asz("net", "allow", name, "files.example", "rebind.example", "alias.example")
	hit("allowed files.example")
	for _, name := range []string{"files.example", "rebind.example"} { // the latter has a LAN address too
		if got := b.MustIn(session, "curl -sS http://"+name+"/"); got != "this is 203.0.113.20:80" {
			t.Errorf("%s after net allow = %q, want 203.0.113.20:80", name, got)
		}
	}
	if r := b.In(session, "curl -sS -m 20 http://alias.example/"); r.Stdout != "this is "+foreignAddr+":80\n" {
		t.Errorf("allowed alias = %s, want %s:80", r.All(), foreignAddr) // the name's owner decides where it leads
	}
	log := b.Asz("net", "log", session, "--json")
	type entry struct {
		Name    string
		End     bool
		BytesIn int64 `json:"bytes_in"`
	}
	var entries []entry
	if err := json.Unmarshal([]byte(log), &entries); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(entries, func(e entry) bool { return e.Name == "files.example" && e.End && e.BytesIn > 0 }) {
		t.Errorf("net log = %s, want the bytes of files.example", log)
	}
	b.Asz("net", "deny", session, "files.example")
	if r := b.In(session, "curl -sS -m 20 http://files.example/"); r.Code == 0 {
		t.Errorf("files.example after net deny = %s, want it denied", r.Stdout)
	}
	b.Asz("net", "allow", session, "files.example")
	b.Fails(2, "203.0.113.9", "net", "allow", name, "203.0.113.9")
}

// addresses tries which connections are possible, including as root.
func addresses(t *testing.T, b *box, name string) {
	t.Helper()
	script := `for target in $1; do
  if timeout 8 bash -c 'exec 3<>"/dev/tcp/${0%:*}/${0##*:}"' "$target" 2>/dev/null; then echo "open $target"; else echo "shut $target"; fi
done
gw=$(ip -4 route show default | cut -d' ' -f3)
if timeout 8 bash -c 'exec 3<>"/dev/tcp/$0/80"' "$gw" 2>/dev/null; then echo "open gateway:80"; else echo "shut gateway:80"; fi`
	b.Write("probe.sh", script)
	b.Asz("cp", "probe.sh", name+":/tmp/probe.sh")
	for _, sudo := range []string{"", "sudo "} {
		got := b.MustIn(name, sudo+"bash /tmp/probe.sh '"+strings.Join([]string{
			"github.com:80", "github.com:22", "github.com:25", "github.com:8080", "github.com:853",
			allowedAddr + ":80", allowedAddr + ":25", lanAddr + ":80", metadataAddr + ":80",
		}, " ")+"'")
		want := strings.Join([]string{
			"open github.com:80", "open github.com:22", "shut github.com:25", "shut github.com:8080", "shut github.com:853",
			"shut " + allowedAddr + ":80", "shut " + allowedAddr + ":25", "shut " + lanAddr + ":80", "shut " + metadataAddr + ":80", "shut gateway:80",
		}, "\n")
		if got != want {
			t.Errorf("%sconnections = %s\nwant %s", sudo, got, want)
		}
	}
	for _, addr := range []string{lanAddr + ":80", metadataAddr + ":80", allowedAddr + ":25"} {
		if n := hitCount(addr); n != 0 {
			t.Errorf("connections to %s = %d, want 0", addr, n)
		}
	}
	if r := b.In(name, "ip -6 route get 2001:db8::1 && ping -6 -c1 -W2 2001:db8::1"); r.Code == 0 {
		t.Errorf("IPv6 = %s, want no route", r.Stdout)
	}
}

// services publishes a port of the guest here, and opens one of the host's to the
// guest.
func services(t *testing.T, b *box, name string) {
	b.MustIn(name, "mkdir -p /tmp/site && echo from the guest >/tmp/site/index.html && "+
		"systemd-run --user --quiet --unit=site python3 -m http.server --directory /tmp/site --bind 127.0.0.1 3000 || "+
		"(cd /tmp/site && setsid -f python3 -m http.server --bind 127.0.0.1 3000 >/dev/null 2>&1)")
	b.MustIn(name, "for i in $(seq 100); do curl -sf http://127.0.0.1:3000/ && break; sleep 0.3; done")
	url := strings.Fields(b.Asz("ports", name, "3000"))[1]
	if r := b.Run("curl", "-sS", "-m", "60", url); r.Stdout != "from the guest\n" {
		t.Errorf("%s = %s, want \"from the guest\"", url, r.All())
	}
	b.Asz("ports", name, "3000", "--close")
	if r := b.Run("curl", "-sS", "-m", "60", url); r.Code == 0 {
		t.Errorf("closed port = %s, want no answer", r.All())
	}

	if r := b.In(name, "curl -sS -m 20 http://host.lima.internal:8088/"); r.Code == 0 {
		t.Errorf("loopback of the host = %s, want no answer", r.All())
	}
	b.Asz("open", "-d", "--host-service", "localhost:8088", name)
	if got := b.MustIn(name, "curl -sS -m 60 http://host.lima.internal:8088/"); got != "this is 127.0.0.1:8088" {
		t.Errorf("host service = %q, want 127.0.0.1:8088", got)
	}
	if r := b.In(name, "curl -sS -m 20 http://host.lima.internal:80/"); r.Code == 0 {
		t.Errorf("another port of the host = %s, want no answer", r.All())
	}
}

func work(t *testing.T, b *box, name, clone string) {
	b.MustIn(name, `git switch -qc feature && git config user.name agent && git config user.email a@example.invalid &&
		echo agent >>hello.txt && git add hello.txt && git commit -qm 'by the agent' && echo loose >loose.txt`)
	b.Fails(4, "would lose work", "destroy", name)
	diff := b.Asz("diff", name)
	for _, want := range []string{"+agent", "+loose"} {
		if !strings.Contains(diff, want) {
			t.Errorf("diff = %s, want %q in it", diff, want)
		}
	}
	out := b.Asz("fetch", name)
	ref := "refs/agents/" + name + "/heads/feature"
	if !strings.Contains(out, ref) {
		t.Errorf("fetch = %s, want %s", out, ref)
	}
	if got := b.RunIn(clone, "git", "log", "-1", "--format=%an %s", ref); got.Stdout != "agent by the agent\n" {
		t.Errorf("fetched commit = %s, want \"agent by the agent\"", got.All())
	}
	if got := b.RunIn(clone, "git", "status", "--porcelain", "--branch"); got.Stdout != "## main\n?? draft.txt\n" {
		t.Errorf("status of the local clone = %q, want it unchanged", got.Stdout)
	}
	b.MustIn(name, "rm loose.txt")
}

func random() string {
	b := make([]byte, 12)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

func kernel(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// searchHome searches for the secret, as bytes, in every file of the box except the
// one that contains it on purpose.
func searchHome(t *testing.T, b *box, secret, but string) {
	t.Helper()
	files := 0
	err := filepath.WalkDir(b.Home, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || path == filepath.Join(b.Home, but) {
			return nil //nolint:nilerr // sockets, and files that vanish during the walk
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return nil //nolint:nilerr // gone meanwhile
		}
		files++
		if bytes.Contains(text, []byte(secret)) {
			t.Errorf("%s contains the secret, want it absent", path)
		}
		return nil
	})
	if err != nil || files < 5 {
		t.Errorf("files searched = %d, %v, want at least 5", files, err)
	}
}
