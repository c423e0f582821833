package script

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
)

// TestCompletionScriptsAreUpToDate compares the scripts in completions/ with what the
// program prints.
func TestCompletionScriptsAreUpToDate(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		want, err := exec.CommandContext(t.Context(), binary, "completion", shell).Output()
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile("../../completions/agent-sessionizer." + shell)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("completions/agent-sessionizer.%s is out of date, want it as generated; run: make completions", shell)
		}
	}
}

// tabs are lines typed up to a Tab, and the completed lines.
var tabs = []struct{ typed, want string }{
	{"agent-sessionizer dest", "agent-sessionizer destroy"},
	{"agent-sessionizer stop al", "agent-sessionizer stop alpha"},
	{"agent-sessionizer destroy alpha be", "agent-sessionizer destroy alpha beta"},
	{"agent-sessionizer open --network al", "agent-sessionizer open --network allowlist"},
	{"agent-sessionizer logs --of=seri", "agent-sessionizer logs --of=serial"},
	{"agent-sessionizer logs alpha --fol", "agent-sessionizer logs alpha --follow"},
	{"agent-sessionizer net allow alpha @git", "agent-sessionizer net allow alpha @github"},
	{"agent-sessionizer cp agent-be", "agent-sessionizer cp agent-beta-ID:"},
	{"agent-sessionizer config edit net", "agent-sessionizer config edit network-"},
	{"agent-sessionizer net explain beta x.exa", "agent-sessionizer net explain beta x.exa"}, // nothing to offer, not even a file
	{"agent-sessionizer open ./alp", "agent-sessionizer open ./alpha/"},
}

// sessionID matches the end of a session's name.
var sessionID = regexp.MustCompile(`-[0-9a-f]{6}\b`)

// TestCompletionInShells checks the completion in each supported shell, as a user would see
// it. make setup installs the shells.
func TestCompletionInShells(t *testing.T) {
	h := newHome(t)
	for _, name := range []string{"alpha", "beta"} {
		if err := os.CopyFS(filepath.Join(h.dir, name), os.DirFS(filepath.Join(h.dir, "repo"))); err != nil {
			t.Fatal(err)
		}
		h.must(t, "open", "-d", "./"+name)
	}
	if err := os.WriteFile(filepath.Join(h.dir, "x.example"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	scripts, err := filepath.Abs("../../completions")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []struct {
		name string
		argv []string
		init string
	}{
		{"bash", []string{"bash", "--norc", "--noprofile", "-i"}, "source /usr/share/bash-completion/bash_completion; source SCRIPT"},
		{"zsh", []string{"zsh", "-f", "-i"}, "autoload -Uz compinit; compinit -D -u; source SCRIPT; bindkey -e; PROMPT_EOL_MARK=; setopt no_auto_remove_slash"},
	} {
		t.Run(s.name, func(t *testing.T) {
			if _, err := exec.LookPath(s.name); err != nil {
				t.Fatalf("%v; run: make setup", err)
			}
			sh := startShell(t, h, s.argv)
			sh.send(strings.ReplaceAll(s.init, "SCRIPT", filepath.Join(scripts, "agent-sessionizer."+s.name)) + "\r")
			for _, c := range tabs {
				// Ctrl-A and echo make the shell itself print the completed line.
				sh.send(c.typed + "\t\x01echo \"<\"\x05\">\"\r")
				got := sessionID.ReplaceAllString(sh.answer(t), "-ID")
				if strings.TrimRight(got, " >") != "<"+c.want {
					t.Errorf("%s⇥ = %q, want %q", c.typed, got, c.want)
				}
			}
		})
	}
	t.Run("fish", func(t *testing.T) {
		if _, err := exec.LookPath("fish"); err != nil {
			t.Fatalf("%v; run: make setup", err)
		}
		for _, c := range tabs {
			cmd := exec.CommandContext(t.Context(), "fish", "--no-config", "-c", "source "+filepath.Join(scripts, "agent-sessionizer.fish")+"; complete -C \""+c.typed+"\"")
			cmd.Dir, cmd.Env = h.dir, h.shellEnv()
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("fish = %v, want nil\n%s", err, out)
			}
			// fish lists the candidates for the last word.
			last := c.want[strings.LastIndex(c.want, " ")+1:]
			found := false
			for line := range strings.Lines(sessionID.ReplaceAllString(string(out), "-ID")) {
				word, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
				found = found || strings.HasPrefix(word, last)
			}
			if offers := c.typed != c.want; found != offers {
				t.Errorf("completions of %s⇥ = %q, want %s among them: %t", c.typed, out, last, offers)
			}
		}
	})
}

// TestCompletionMakesNothing checks that completion creates nothing and runs no VM driver.
func TestCompletionMakesNothing(t *testing.T) {
	h := newHome(t)
	for _, args := range [][]string{{"open", ""}, {"stop", ""}, {"net", "allow", "x", ""}, {"cp", ""}, {"open", "--image", ""}, {"image", "remove", ""}, {"config", "show", "--repo", ""}} {
		if out, err := h.run(append([]string{"__complete"}, args...)...); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	left, err := filepath.Glob(filepath.Join(h.dir, ".*"))
	if err != nil || len(left) > 0 {
		t.Errorf("files made by a completion = %q, %v, want none", left, err)
	}
}

// shellEnv returns the environment in which a shell finds the program.
func (h *home) shellEnv() []string {
	return append(slices.Clone(h.env), "PATH="+filepath.Dir(binary)+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// shell is a shell that runs on its own terminal.
type shell struct {
	tty *os.File
	mu  sync.Mutex
	out []byte
	at  int // how much of out was consumed
	new chan struct{}
}

func startShell(t *testing.T, h *home, argv []string) *shell {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = h.dir, append(h.shellEnv(), "PS1=$ ", "TERM=xterm", "INPUTRC=/dev/null")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 50, Cols: 500})
	if err != nil {
		t.Fatal(err)
	}
	s := &shell{tty: tty, new: make(chan struct{}, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := tty.Read(buf)
			s.mu.Lock()
			s.out = append(s.out, buf[:n]...)
			s.mu.Unlock()
			select {
			case s.new <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = tty.Close()
		<-done
	})
	return s
}

func (s *shell) send(text string) { _, _ = io.WriteString(s.tty, text) }

var answer = regexp.MustCompile(`[\r\n](<[^\r\n]*)\r\n`)

// answer returns the next line that starts with "<".
func (s *shell) answer(t *testing.T) string {
	t.Helper()
	end := time.After(2 * time.Minute)
	for {
		s.mu.Lock()
		rest := string(s.out[s.at:])
		s.mu.Unlock()
		if at := answer.FindStringSubmatchIndex(rest); at != nil {
			s.mu.Lock()
			s.at += at[3]
			s.mu.Unlock()
			return rest[at[2]:at[3]]
		}
		select {
		case <-s.new:
		case <-end:
			t.Fatalf("output of the shell = %q, want an answer in time", rest)
		}
	}
}
