package script

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/agent-sessionizer/agent-sessionizer/test/termtexttest"
)

const (
	// guestWord is part of everything that the hostile guest prints.
	guestWord = "GUESTWORD"

	// hostile makes terminals answer, print, and change their title, clipboard and modes.
	hostile = "\x1b[21t\x1b[5i\x1bP$qm\x1b\\\x1b_Gx\x1b\\\x1b]52;c;cHdu\x07\x1b]0;title\x07\u009b21t\x1b[?1000h\x1b[2J\x05\x1b[31m" + guestWord
)

// redraws matches the sequences with which the console itself redraws running steps and
// repeated lists, and with which the screen of a review sets tab stops. The guest's output contains none
// of them.
var redraws = regexp.MustCompile(`(\x1b\[[0-9]+A)?\r\x1b\[J|\x1b\[H\x1b\[2J|\x1b\[\?5W`)

// TestCommandsOnATerminalWithAHostileGuest runs every command on a terminal, in a home
// whose guest is hostile in all its output. The output must only show text on that
// terminal. testdata/hostile/commands describes how each command is run;
// TestEveryCommandMeetsAHostileGuest in pkg/cli compares that table with the commands.
func TestCommandsOnATerminalWithAHostileGuest(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	vars := hostileHome(t, h)
	table, err := os.Open("testdata/hostile/commands")
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	for lines := bufio.NewScanner(table); lines.Scan(); {
		verb, rest, _ := strings.Cut(lines.Text(), " ")
		if verb == "" || verb == "#" || verb == "skip" {
			continue
		}
		args := strings.Fields(os.Expand(rest, func(name string) string {
			value, ok := vars[name]
			if !ok {
				t.Fatalf("variable %s in %q = none, want one", name, lines.Text())
			}
			return value
		}))
		t.Run(strings.ReplaceAll(rest, "/", "_"), func(t *testing.T) {
			effects := termtexttest.Effects
			keys := ""
			switch verb {
			case "shows", "runs":
			case "follows":
				keys = "\x03" // Ctrl-C
			case "draws":
				keys, effects = "\x1b", termtexttest.ScreenEffects // Escape
			case "quits":
				keys, effects = "q", termtexttest.ScreenEffects
			case "lasts":
				effects = termtexttest.ScreenEffects
			default:
				t.Fatalf("verb = %q, want a known one", verb)
			}
			seen := h.onTerminal(t, keys, args...)
			if found := effects(redraws.ReplaceAllString(seen, "")); len(found) > 0 {
				t.Errorf("effects on the terminal = %q, want none:\n%q", found, seen)
			}
			if verb != "runs" && !strings.Contains(seen, guestWord) {
				t.Errorf("output = %q, want %q of the guest", seen, guestWord)
			}
		})
	}
}

// onTerminal runs the program on its own terminal until it ends, and returns its output. It
// presses keys once the guest's text is on the terminal.
func (h *home) onTerminal(t *testing.T, keys string, args ...string) string {
	t.Helper()
	cmd := h.command(t.Context(), args...)
	cmd.Env = append(cmd.Env, "TERM=xterm-256color", "TMUX_TMPDIR="+h.dir, "TMUX=", "EDITOR=true", "NO_COLOR=")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 50, Cols: 200})
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	late := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	var seen bytes.Buffer
	buf := make([]byte, 4096)
	for err == nil {
		var n int
		n, err = tty.Read(buf)
		seen.Write(buf[:n])
		if keys != "" && bytes.Contains(seen.Bytes(), []byte(guestWord)) {
			_, err = tty.WriteString(keys)
			keys = ""
		}
	}
	_ = cmd.Wait() // many of the commands are expected to fail
	if !late.Stop() {
		t.Errorf("command did not end in time, want it ended:\n%q", seen.String())
	}
	if !errors.Is(err, syscall.EIO) { // the error at the end of a terminal
		t.Errorf("read of the terminal = %v, want %v", err, syscall.EIO)
	}
	return seen.String()
}

// hostileHome creates a session and tasks with a hostile guest, and returns the values of
// the table's variables.
func hostileHome(t *testing.T, h *home) map[string]string {
	t.Helper()
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if !filepath.IsAbs(name) {
			name = filepath.Join(h.dir, name)
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.RemoveAll(name), os.WriteFile(name, []byte(text), mode)); err != nil {
			t.Fatal(err)
		}
	}
	quoted, err := json.Marshal(hostile)
	if err != nil {
		t.Fatal(err)
	}
	write("hostile", hostile, 0o600)
	write("stderr.sh", "cat "+h.dir+"/hostile >&2", 0o600)
	write("commit.sh", "git config user.email a@example.invalid && git config user.name \"$(cat "+h.dir+"/hostile)\" && cat "+h.dir+"/hostile >\"$(cat "+h.dir+"/hostile)\" && git add -A && git commit -qm hostile", 0o600)
	write("broken.json", fmt.Sprintf(`{"exec": {"match": "agent-guest", "error": %s}}`, quoted), 0o600)
	h.must(t, "open", "-d", "./repo")
	var list []struct{ ID, Name string }
	if err := json.Unmarshal([]byte(h.must(t, "list", "--json")), &list); err != nil || len(list) != 1 {
		t.Fatalf("sessions = %v, %v, want 1", list, err)
	}
	id, vm := list[0].ID, filepath.Join(h.dir, ".agent-vms", list[0].Name)
	root := filepath.Join(vm, "root")

	// Replace the guest's programs. Of the guest program, replace only the commands that
	// report something.
	program := filepath.Join(root, "usr/local/bin/agent-guest")
	if err := os.Rename(program, program+".real"); err != nil {
		t.Fatal(err)
	}
	observation := fmt.Sprintf(`{"version":1,"agents":[{"name":%[1]s,"state":"blocked","on":%[1]s,"since":"2026-01-01T00:00:00Z"}],"window":%[1]s,"screen":[%[1]s],"changes":{"branch":%[1]s,"commits":1,"files":1},"questions":[{"id":"0123456789abcdef","kind":"question","agent":%[1]s,"tool":%[1]s,"text":%[1]s,"choices":[%[1]s]}]}`, quoted)
	query := fmt.Sprintf(`{"seq":1,"time":"2026-01-01T00:00:00Z","name":%[1]s,"type":"A","reason":%[1]s,"process":%[1]s}`, quoted)
	write(filepath.Join(root, "observation"), observation+"\n", 0o600)
	write(filepath.Join(root, "query"), strings.Replace(query, string(quoted), `"denied.example.com"`, 1)+"\n", 0o600)
	write(program, `#!/bin/sh
case $1 in
watch) cat $AGENT_GUEST_ROOT/observation; exec cat ;;
log) cat $AGENT_GUEST_ROOT/query ;;
status) cat `+h.dir+`/hostile >&2; exit 1 ;;
*) exec $0.real "$@" ;;
esac
`, 0o755)
	write(filepath.Join(root, "usr/local/bin/ready-tmux"), "#!/bin/sh\n", 0o755)
	write(filepath.Join(root, "bin/tmux"), "#!/bin/sh\ncat "+h.dir+"/hostile\n", 0o755)
	write(filepath.Join(root, "home/agent/.profile"), "cat "+h.dir+"/hostile\nexit\n", 0o600)
	output := fmt.Sprintf(`{"type":"system","subtype":"init","session_id":%[1]s,"model":%[1]s}
{"type":"assistant","message":{"id":%[1]s,"content":[{"type":"text","text":%[1]s},{"type":"tool_use","id":"x","name":%[1]s,"input":{"command":%[1]s}}]},"error":%[1]s}
{"type":"result","is_error":true,"result":%[1]s,"errors":[%[1]s]}
`, quoted)
	write(filepath.Join(root, "output"), output, 0o600)
	write(filepath.Join(root, "bin/claude"), `#!/bin/sh
grep -q slow "$AGENT_TASK_BRIEF" && { head -n 2 $AGENT_GUEST_ROOT/output; exec sleep 1000; }
cat $AGENT_GUEST_ROOT/output
cat `+h.dir+`/hostile >&2
exit 1
`, 0o755)
	for _, name := range []string{"serial.log", "ha.stderr.log"} {
		write(filepath.Join(vm, name), hostile+"\n", 0o600)
	}

	// Create work in the guest.
	h.must(t, "exec", "repo", "--", "sh", "-ec", `
H=$(cat `+h.dir+`/hostile)
pkill -f "^$AGENT_GUEST_ROOT/usr/local/bin/agent-guest watch" || :
echo "$H" >"$H"
git add -A
git -c "user.name=$H" -c user.email=a@localhost.invalid commit -qm "$H"
echo "$H" >>"$H"
echo "$H" >"untracked $H"
mkdir -p dir && echo "$H" >"dir/$H" && mkfifo "dir/fifo $H"
`)
	h.until(t, "the guest's agent is known", func() bool { return strings.Contains(h.must(t, "list"), guestWord) })
	decision := fmt.Sprintf(`{"time":"2026-01-01T00:00:00Z","kind":"dns","proto":"udp","name":%[1]s,"port":53,"rule":%[1]s,"source":%[1]s,"reason":%[1]s}`, quoted)
	decisions, err := os.OpenFile(filepath.Join(h.dir, ".local/state/agent-sessionizer/sessions", id, "gateway/decisions.jsonl"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = fmt.Fprintf(decisions, "%s\n%s\n", strings.Replace(decision, "{", `{"seq":1000000,`, 1), strings.Replace(strings.Replace(decision, string(quoted), `"denied.example.com"`, 1), "{", `{"seq":1000001,`, 1))
	if err := errors.Join(err, decisions.Close()); err != nil {
		t.Fatal(err)
	}

	// Run two tasks: one in a session, whose agent prints text, and one with files and a
	// commit.
	const task = "version: \"1\"\nkind: Task\nmetadata: {name: %s}\n%s\n"
	write("claude.yaml", fmt.Sprintf(task, "says", "vm: {session: repo}\nagent: {kind: claude, prompt: x}"), 0o600)
	write("slow.yaml", fmt.Sprintf(task, "slow", "vm: {session: repo}\nagent: {kind: claude, prompt: slow}"), 0o600)
	write("files.yaml", fmt.Sprintf(task, "files", "vm: {session: repo}\nagent: {kind: command, command: [sh, -c, 'H=$(cat "+h.dir+"/hostile); echo \"$H\"; echo \"$H\" >&2; echo \"$H\" >\"new $H\"; exit 3']}\nlifecycle: {artifact_patterns: [\"dir/**\"]}"), 0o600)
	write("wrong.yaml", fmt.Sprintf(task, "wrong", "vm: {session: repo}\nagent: {kind: command, command: [x], "+string(quoted)+": x}"), 0o600)
	vars := map[string]string{"ID": id, "WORD": guestWord, "HOME": h.dir, "REF": "\u009b21t" + guestWord}
	for name, variable := range map[string]string{"claude": "SAYS", "files": "FILES"} {
		out, _ := h.run("task", "run", "-f", name+".yaml")
		var tasks []struct{ ID, Name string }
		if err := json.Unmarshal([]byte(h.must(t, "task", "list", "--json")), &tasks); err != nil || len(tasks) == 0 {
			t.Fatalf("tasks after starting %s = %v, %v, want some\n%s", name, tasks, err, out)
		}
		vars[variable] = tasks[0].ID
	}
	return vars
}
