//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// attemptFiles is the part of the output of review --json that the test reads.
type attemptFiles struct {
	Files []struct {
		Path   string `json:"path"`
		Status string `json:"status"`
	} `json:"files"`
	Landed  []string `json:"landed"`
	Results []struct {
		Name        string `json:"name"`
		ExitCode    int    `json:"exit_code"`
		Uncommitted bool   `json:"uncommitted"`
	} `json:"results"`
}

// reviewWork lands what the agent committed in two parts, while the agent goes on.
func reviewWork(t *testing.T, b *box, name, clone string) {
	for _, setting := range [][]string{{"user.name", "The User"}, {"user.email", "user@example.invalid"}} {
		if r := b.RunIn(clone, "git", "config", setting[0], setting[1]); r.Code != 0 {
			t.Fatalf("git config %s = %s, want exit 0", setting[0], r.All())
		}
	}
	git := func(args ...string) string {
		t.Helper()
		r := b.RunIn(clone, append([]string{"git"}, args...)...)
		if r.Code != 0 {
			t.Errorf("git %s = %s, want exit 0", strings.Join(args, " "), r.All())
		}
		return strings.TrimSpace(r.Stdout)
	}
	review := func() (a attemptFiles, paths []string) {
		t.Helper()
		var all []attemptFiles
		if err := json.Unmarshal([]byte(b.Asz("review", "--json", name)), &all); err != nil || len(all) != 1 {
			t.Fatalf("review --json = %v, %v, want one attempt", all, err)
		}
		for _, f := range all[0].Files {
			paths = append(paths, f.Status+" "+f.Path)
		}
		return all[0], paths
	}
	before := git("status", "--porcelain", "--branch")
	b.MustIn(name, `mkdir -p parser && echo one >parser/one.txt && echo two >two.txt && git add parser two.txt && git commit -qm 'two files'`)
	b.Asz("exec", "--record=tests", name, "--", "true")
	a, paths := review()
	for _, want := range []string{"A parser/one.txt", "A two.txt"} {
		if !slices.Contains(paths, want) {
			t.Errorf("files under review = %q, want %q among them", paths, want)
		}
	}
	if len(a.Results) != 1 || a.Results[0].Name != "tests" || a.Results[0].ExitCode != 0 {
		t.Errorf("results = %+v, want the tests, with exit code 0", a.Results)
	}
	b.Asz("review", "--land", "-m", "Add a parser", "--branch", "review/e2e", name, "--", "parser")
	if got := git("diff", "--name-only", "main", "review/e2e"); got != "parser/one.txt" {
		t.Errorf("files of the branch = %q, want parser/one.txt", got)
	}
	if got := git("log", "-1", "--format=%an%n%B", "review/e2e"); !strings.HasPrefix(got, "The User\nAdd a parser\n\nCo-authored-by: agent <a@example.invalid>\nAgent-Session: "+name+"\n") {
		t.Errorf("commit = %q, want the user as its author and the agent in a trailer", got)
	}
	b.MustIn(name, `echo more >>parser/one.txt && git commit -qam 'go on'`)
	if a, paths = review(); !slices.Contains(paths, "M parser/one.txt") || slices.Contains(paths, "A parser/one.txt") {
		t.Errorf("files after the agent went on = %q, want parser/one.txt as modified", paths)
	}
	b.Asz("review", "--land", "--branch", "review/e2e", name)
	if a, paths = review(); len(paths) != 0 || !slices.Contains(a.Landed, "parser/one.txt") {
		t.Errorf("files in the end = %q, landed %q, want none left", paths, a.Landed)
	}
	if got, want := git("rev-parse", "review/e2e^{tree}"), git("rev-parse", "refs/agents/"+name+"/HEAD^{tree}"); got != want {
		t.Errorf("tree of the branch = %s, want the agent's, %s", got, want)
	}
	if after := git("status", "--porcelain", "--branch"); after != before {
		t.Errorf("status of the clone = %q, want it unchanged: %q", after, before)
	}
	// Without an agent, notes cannot be sent; a review without notes has nothing to send.
	if r := b.Asz("review", "--send", name); r != "" {
		t.Errorf("review --send = %q, want no output", r)
	}
}

// agentScript is what the agent's model runs in the guest. Its first commit has every kind of change, and
// MANY small files.
const agentScript = `set -e
commit() { git add -A && git -c user.name=Claude -c user.email=noreply@anthropic.com commit -qm "$1"; }
case $1 in
first)
	sed -i 's/line 5$/line five/; s/line 35$/line thirty-five/' parser.go
	git mv old.txt new.txt
	head -c 3000 /dev/urandom >picture.bin
	chmod +x tool.sh
	sed -i 's/^two/TWO/' crlf.txt
	printf 'title \033]0;owned\007\033[2J\233 end\n' >escapes.txt
	printf x >"$(printf 'esc\033[31m\nline.txt')"
	printf x >-dash && printf x >'ü $(touch pwned).txt'
	mkdir many && seq -f 'file %g' MANY | (cd many && split -l 1 -a 5 -d - f)
	git init -q /tmp/lib && git -C /tmp/lib -c user.name=a -c user.email=a@example.invalid commit -q --allow-empty -m lib
	git -c protocol.file.allow=always submodule --quiet add /tmp/lib vendor/lib
	echo '* filter=evil diff=evil merge=evil' >.gitattributes
	commit 'change everything' ;;
second)
	sed -i 's/line thirty-five$/line 5 times 7/' parser.go
	echo later >later.txt
	commit 'go on' ;;
way*)
	echo "$1" >way.txt && echo "only $1" >"only-$1.txt"
	commit "try $1" ;;
esac
`

// judged is a session whose work is reviewed in a terminal.
type judged struct {
	*box
	u           terminal
	forge       *forge
	clone, name string
	many        int // files, of the agent's first commit
}

func (j judged) git(args ...string) string {
	j.t.Helper()
	r := j.RunIn(j.clone, append([]string{"git"}, args...)...)
	if r.Code != 0 {
		j.t.Fatalf("git %s = exit %d\n%s", strings.Join(args, " "), r.Code, r.All())
	}
	return strings.TrimSpace(r.Stdout)
}

// status returns the state of the clone's branch, index and files.
func (j judged) status() string {
	return j.git("-c", "core.fsmonitor=false", "status", "--porcelain", "--branch")
}

// commits lets Claude Code run a part of the script in a session.
func (j judged) commits(session, part string) {
	j.t.Helper()
	j.MustIn(session, "cat >/tmp/agent.sh <<'END'\n"+strings.ReplaceAll(agentScript, "MANY", strconv.Itoa(j.many))+"END\nclaude -p 'COMMIT "+part+"' --dangerously-skip-permissions")
}

// lands lands what is chosen, with a message.
func (j judged) lands(message, summary, result string) {
	j.t.Helper()
	j.u.typed("L")
	j.u.sees(summary)
	j.u.typed("C-u", message, "Enter", "Enter")
	j.u.sees(result)
}

// TestReview reviews what the real Claude Code commits, in a real terminal: it lands one hunk, sends the agent
// a note, lands the rest and opens a pull request. If it is not short, it also compares forks.
func TestReview(t *testing.T) {
	t.Parallel()
	useForgeAddr(t, "api.anthropic.com")
	b := newBox(t)
	j := judged{box: b, clone: b.Repo("project"), many: 10_000}
	if testing.Short() { // an emulated guest needs minutes to commit as many
		j.many = 300
	}
	var code strings.Builder
	code.WriteString("package parser\n\nfunc parse(fields [40]string) (v [40]int) {\n")
	for i := range 36 {
		fmt.Fprintf(&code, "\tv[%d] = number(fields[%d], \"no number\") // from line %d\n", i, i, i+4)
	}
	code.WriteString("\treturn v\n}\n")
	for name, text := range map[string]string{
		"parser.go": code.String(), "old.txt": strings.ReplaceAll(code.String(), "v", "w"),
		"crlf.txt": "one\r\ntwo\r\nthree\r\n", "tool.sh": "#!/bin/sh\n", "picture.bin": "\x00\x01\x02",
	} {
		b.Write("project/"+name, text)
	}
	j.git("add", "-A")
	j.git("commit", "-qm", "files")
	root := filepath.Join(b.Home, "forge")
	j.git("clone", "-q", "--bare", j.clone, filepath.Join(root, repository))
	j.git("--git-dir", filepath.Join(root, repository), "config", "http.receivepack", "true")
	j.git("remote", "add", "origin", "https://github.com/"+strings.TrimSuffix(repository, ".git"))

	j.forge = newForge(t, root, "ghp_"+random(), "api.anthropic.com", "api.github.com", "github.com")
	m := &model{think: make(chan struct{})}
	j.forge.http.HandleFunc("api.anthropic.com/", m.ServeHTTP)
	b.Write("ca.pem", string(j.forge.ca))
	b.Env = append(b.Env, "SSL_CERT_FILE="+filepath.Join(b.Home, "ca.pem"))
	b.Write(".config/agent-sessionizer/config.yaml", `
secrets:
  ANTHROPIC_AUTH_TOKEN: {from: "cmd:printf sk-ant-oat01-`+random()+`", to: [api.anthropic.com], like: sk-ant-oat01-}
`)
	b.Asz("trust", "./project")
	j.name = b.open("./project")
	j.u = newTerminal(t, b)
	j.commits(j.name, "first")
	j.landParts()
	j.openPull()
	if !testing.Short() { // each fork is one more VM
		j.compareForks()
	}
}

// landParts lands one hunk, lets the agent go on, and lands the rest.
func (j judged) landParts() {
	t, u := j.t, j.u
	// Programs that the agent's .gitattributes would select, and hooks.
	evil := filepath.Join(j.Home, "evil")
	j.Write("hooks/reference-transaction", "#!/bin/sh\ntouch "+evil+"\n")
	j.Run("chmod", "+x", "hooks/reference-transaction")
	for _, key := range []string{"filter.evil.clean", "filter.evil.smudge", "diff.evil.command", "diff.evil.textconv", "merge.evil.driver", "core.fsmonitor"} {
		j.git("config", key, "touch "+evil)
	}
	j.git("config", "core.hooksPath", filepath.Join(j.Home, "hooks"))
	before := j.status()

	u.typed("cd project && "+j.Binary+" review --branch review/taken "+j.name, "Enter")
	first, all := fmt.Sprintf("%d files", j.many+12), fmt.Sprintf("%d files", j.many+13)
	u.sees(first)
	u.typed("/", "escapes.txt", "Enter")
	u.sees("title ")
	u.typed("/", "parser.go", "Enter")
	u.sees("line thirty-five")
	u.typed("Tab", "/", "line five", "Enter", "Space")
	u.sees("1 chosen")
	u.picture("review")
	j.lands("Take line five", "1 file", "1 file landed on review/taken")
	if got := j.git("diff", "main", "review/taken", "-U0", "--no-ext-diff", "--no-textconv"); strings.Count(got, "\n@@") != 1 || !strings.Contains(got, "// from line five") {
		t.Errorf("what landed = %s, want the hunk with line five alone", got)
	}

	// The note becomes the prompt of the agent in its window, which goes on.
	u.typed("/", "thirty-five", "Enter", "n")
	u.sees("note on parser.go:35")
	u.typed("COMMIT second", "Enter", "S")
	u.sees("send 1 note to")
	u.typed("y")
	u.sees("sent 1 note to")
	testenv.WaitFor(t, "the agent's next commit", func() bool { return j.In(j.name, "git log -1 --format=%s").Stdout == "go on\n" })
	u.typed("r")
	u.sees(all)
	u.typed("Tab", "/", "parser.go", "Enter")
	u.sees("line 5 times 7")
	u.typed("A")
	u.sees(fmt.Sprintf("%d chosen", j.many+13))
	j.lands("Take the rest", all, all+" landed on review/taken")
	u.sees("review/taken   0 files")
	if title := u.tmux("display-message", "-p", "-t", "t", "#{pane_title}"); strings.Contains(title, "owned") {
		t.Errorf("title of the terminal = %q, want that of the review", title)
	}
	u.typed("q")
	u.until("the end of the review", func(screen string) bool { return !strings.Contains(screen, "q quit") })

	if got, want := j.git("rev-parse", "review/taken^{tree}"), j.git("rev-parse", "refs/agents/"+j.name+"/HEAD^{tree}"); got != want {
		t.Errorf("tree of the branch = %s, want the agent's, %s", got, want)
	}
	if got := j.git("log", "--format=%s %an", "main..review/taken"); got != "Take the rest Tester\nTake line five Tester" {
		t.Errorf("commits = %q, want each landing once", got)
	}
	if after := j.status(); after != before {
		t.Errorf("status of the clone = %q, want it unchanged: %q", after, before)
	}
	if _, err := os.Stat(evil); err == nil {
		t.Error("git ran a program of the configuration that the agent's files select")
	}
	for _, key := range []string{"core.hooksPath", "core.fsmonitor"} {
		j.git("config", "--unset", key)
	}
}

// openPull opens a pull request from this host, with its own token, through its proxy.
func (j judged) openPull() {
	p := newProxy(j.t)
	for _, name := range []string{"api.github.com", "github.com"} {
		p.leads(name, forgeAddr)
	}
	pulls := servePulls(j.t, j.forge)
	j.git("config", "credential.helper", "!f() { echo username=x-access-token; echo password=$GH_TOKEN; }; f")
	env := j.Env
	defer func() { j.Env = env }()
	j.Env = append(slices.Clone(env), "HTTPS_PROXY="+p.url, "GH_TOKEN="+j.forge.token, "GIT_SSL_CAINFO="+filepath.Join(j.Home, "ca.pem"))
	for range 2 { // the second time, it is found
		if got := j.Asz("review", "--pr", "--branch", "review/taken", j.name); got != "https://github.com/team/project/pull/7\n" {
			j.t.Errorf("review --pr = %q, want the address", got)
		}
	}
	if got := pulls.opened(); len(got) != 1 || got[0].Head != "review/taken" || got[0].Base != "main" || got[0].Title != "Take the rest" {
		j.t.Errorf("pull requests = %+v, want one from review/taken into main", got)
	}
	if got, want := j.git("--git-dir", filepath.Join(j.forge.root, repository), "rev-parse", "review/taken"), j.git("rev-parse", "review/taken"); got != want {
		j.t.Errorf("branch on the remote = %s, want %s", got, want)
	}
}

// compareForks lets forks of a session do the same differently, and lands a part of two.
func (j judged) compareForks() {
	t, u := j.t, j.u
	var forks []session.View
	if err := json.Unmarshal([]byte(j.Asz("fork", "--json", "-n", "3", j.name)), &forks); err != nil || len(forks) != 3 {
		t.Fatalf("fork -n 3 = %d forks, %v", len(forks), err)
	}
	j.Asz("stop", j.name)
	command := "clear; " + j.Binary + " review --branch review/ways"
	for i, f := range forks {
		j.commits(f.Name, fmt.Sprintf("way%d", i+1))
		if r := j.Run("agent-sessionizer", "exec", "--record=tests", f.Name, "--", "grep", "-q", "way2", "way.txt"); (r.Code == 0) != (i == 1) {
			t.Errorf("exec --record in fork %d = exit %d\n%s", i+1, r.Code, r.All())
		}
		command += " " + f.Name
	}
	u.typed(command, "Enter")
	u.sees("✗ tests (exit 1)")
	u.sees("✓ tests")
	u.typed("/", "only-way1", "Enter", "Space")
	u.sees("(1 chosen)")
	u.typed("t")
	u.sees("▸ 2 ")
	u.typed("/", "way.txt", "Enter", "Space")
	u.until("files of two attempts chosen", func(screen string) bool { return strings.Count(screen, "(1 chosen)") == 2 })
	u.picture("attempts")
	j.lands("Take the best", "2 files", "2 files landed on review/ways")
	u.typed("q")
	if got := j.git("diff", "--name-only", "--no-ext-diff", "main", "review/ways"); got != "only-way1.txt\nway.txt" {
		t.Errorf("files of the branch = %q, want one of each of two forks", got)
	}
	if got := j.git("show", "review/ways:way.txt"); got != "way2" {
		t.Errorf("way.txt = %q, want that of the second fork", got)
	}
	if got, want := j.git("log", "--format=%(trailers:key=Agent-Session,valueonly,separator=%x20)", "main..review/ways"), forks[1].Name+"\n"+forks[0].Name; got != want {
		t.Errorf("sessions of the commits = %q, want %q", got, want)
	}
}

// pullRequest is what the API of GitHub gets.
type pullRequest struct{ Title, Body, Head, Base string }

// pullServer is the part of GitHub's API for pull requests.
type pullServer struct {
	mu  sync.Mutex
	all []pullRequest
}

func (p *pullServer) opened() []pullRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.all)
}

// servePulls adds the pull requests of team/project to a forge.
func servePulls(t *testing.T, f *forge) *pullServer {
	p := &pullServer{}
	f.http.HandleFunc("api.github.com/repos/team/project/pulls", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+f.token {
			t.Errorf("%s %s with authorization %q, want the host's token", r.Method, r.URL, r.Header.Get("Authorization"))
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		answer := []block{}
		for range p.all {
			answer = append(answer, block{"html_url": "https://github.com/team/project/pull/7"})
		}
		if r.Method == http.MethodGet {
			_ = json.NewEncoder(w).Encode(answer)
			return
		}
		var made pullRequest
		if err := json.NewDecoder(r.Body).Decode(&made); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		p.all = append(p.all, made)
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(block{"html_url": "https://github.com/team/project/pull/7"})
	})
	return p
}
