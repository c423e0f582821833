package review_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

func TestSeveralAttempts(t *testing.T) {
	c := newClone(t, map[string]string{"a": "1\n2\n3\n4\n5\n", "b": "b\n"})
	c.agent("s", `sed -i 's/3/three/' a; echo s >s`)
	c.agent("t", `sed -i 's/3/drei/' a; echo t >t`)
	w := c.open("s", "t")
	for _, a := range w.Attempts() {
		if err := a.ChooseAll(true); err != nil {
			t.Fatal(err)
		}
	}
	done, err := w.Land(t.Context(), review.LandRequest{})
	conflict, ok := errors.AsType[*review.ConflictError](err)
	if !ok {
		t.Fatalf("land attempts that conflict: %v, want a conflict", err)
	}
	// The result says what has landed all the same.
	c.equal("landed", done.Commits, []review.LandedCommit{{Session: "s", Commit: c.git("rev-parse review/s"), Files: []string{"a", "s"}}})
	c.equal("conflicts", []string{conflict.Conflicts[0].Session, conflict.Conflicts[0].Path, conflict.Conflicts[0].Why}, []string{"t", "a", ""})
	c.equal("what is left", names(w), []string{"M a", "A t"})

	c.git(`config mergetool.pick.cmd 'cat "$LOCAL" "$REMOTE" >"$MERGED"' && git config mergetool.pick.trustExitCode true && git config merge.tool pick && git config mergetool.prompt false`)
	resolved, err := w.MergeTool(t.Context(), conflict.Conflicts[0], review.Terminal{})
	if err != nil {
		t.Fatalf("run the merge tool: %v", err)
	}
	done = c.land(w, review.LandRequest{Resolutions: []review.Resolution{resolved}})
	c.equal("commits", len(done.Commits), 1)
	c.equal("a", c.git("show review/s:a"), "1\n2\nthree\n4\n5\n1\n2\ndrei\n4\n5")
	c.equal("what is left in the end", names(w), []string{})
}

// A resolution counts for the conflict that the user saw, and for no other.
func TestResolutionOfAnotherConflict(t *testing.T) {
	c := newClone(t, map[string]string{"a": "1\n"})
	c.agent("s", `echo agent >a`)
	c.git("branch review/s && git checkout -q review/s && echo branch >a && git commit -qam other && git checkout -q main")
	w := c.open("s")
	_, err := w.Land(t.Context(), review.LandRequest{Paths: []string{"a"}})
	conflict, ok := errors.AsType[*review.ConflictError](err)
	if !ok {
		t.Fatalf("land: %v, want a conflict", err)
	}
	r := review.Resolution{Conflict: conflict.Conflicts[0], Result: conflict.Conflicts[0].Theirs}
	c.git("checkout -q review/s && echo newer >a && git commit -qam newer && git checkout -q main")
	if _, err := w.Land(t.Context(), review.LandRequest{Paths: []string{"a"}, Resolutions: []review.Resolution{r}}); err == nil {
		t.Error("land with the resolution of an older conflict: no error, want a conflict")
	}
}

// The branch moved on: the landing goes on top.
func TestMovedBranch(t *testing.T) {
	c := newClone(t, map[string]string{"a": "1\n2\n3\n4\n5\n6\n7\n8\n9\n"})
	c.agent("s", `sed -i 's/^1$/one/' a`)
	c.write(map[string]string{"a": "1\n2\n3\n4\n5\n6\n7\n8\nnine\n"})
	c.git("commit -qam 'the user works on main'")
	w := c.open("s")
	c.land(w, review.LandRequest{Paths: []string{"."}})
	c.equal("a", c.git("show review/s:a"), "one\n2\n3\n4\n5\n6\n7\n8\nnine")
	c.equal("parent", c.git("rev-parse review/s^"), c.git("rev-parse main"))
}

// The agent took over what the host's branch has: that is not its work. What had landed before is not offered
// again, except in files where that is impossible.
func TestMovedBase(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n", "b": "b\n", "c": "c\n"})
	c.agent("s", `echo landed >>a; echo landed >>b; echo open >>c`)
	w := c.open("s")
	c.land(w, review.LandRequest{Paths: []string{"a", "b"}})
	c.write(map[string]string{"b": "b\nuser\n", "user": "user\n"})
	c.git("add -A && git commit -qm 'the user works on main'")
	c.agent("s", `git merge -q -s ours main && git checkout main -- user && printf 'b\nuser\nlanded\n' >b`)
	c.equal("files", names(c.open("s")), []string{"M b", "M c"})
}

// A fork is not asked again about what had landed of its parent, and never offers to undo it.
func TestFork(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n", "b": "b\n"})
	c.agent("s", `echo 2 >>a`)
	c.git("update-ref refs/agents/f/HEAD refs/agents/s/HEAD")
	c.agent("s", `echo 2 >>b`)
	c.land(c.open("s"), review.LandRequest{Paths: []string{"."}})
	c.agent("f", `echo fork >fork`)
	o := c.options("f")
	o.Sources[0].Parent = "id-s"
	w := c.openWith(o)
	c.equal("files", names(w), []string{"A fork"})
	if _, err := w.Attempts()[0].AddNote(review.Target{Path: "fork"}, "Why?"); err != nil {
		t.Fatal(err)
	}
	w = c.openWith(o)
	c.equal("files after a note", names(w), []string{"A fork"})
	c.land(w, review.LandRequest{Paths: []string{"."}, Branch: "review/s"})
	c.equal("branch", c.git("ls-tree -r --name-only review/s"), "a\nb\nfork")
	c.equal("b", c.git("show review/s:b"), "b\n2")
}

// A landing that was interrupted before it was recorded is complete if the branch has its commit. Once, the files
// that had conflicted were offered again.
func TestUnrecordedLanding(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n", "b": "b\n"})
	c.agent("s", `echo agent >a; echo agent >b`)
	c.write(map[string]string{"a": "user\n"})
	c.git("commit -qam 'the user works on main'")
	w := c.open("s")
	if err := w.Attempts()[0].ChooseFile(0, true); err != nil {
		t.Fatal(err)
	}
	_, err := w.Land(t.Context(), review.LandRequest{})
	conflict, ok := errors.AsType[*review.ConflictError](err)
	if !ok {
		t.Fatalf("land: %v, want a conflict", err)
	}
	r := review.LandRequest{Resolutions: []review.Resolution{{Conflict: conflict.Conflicts[0], Result: conflict.Conflicts[0].Theirs}}}

	// The directory of the record disappears when the branch has the commit, or before.
	for _, when := range []string{"before", "after"} {
		git := c.sh("command -v git")
		bin, away := t.TempDir(), c.state+".away"
		hide := "mv " + c.state + " " + away + "; touch " + c.state + "; "
		script := git + " \"$@\" && " + hide
		if when == "before" {
			script = hide + "exit 1"
		}
		script = "#!/bin/sh\ncase \"$*\" in *update-ref*refs/heads/review/s*) " + script + ";; *) exec " + git + " \"$@\";; esac\n"
		if err := os.WriteFile(filepath.Join(bin, "git"), []byte(script), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
		path := os.Getenv("PATH")
		t.Setenv("PATH", bin+":"+path)
		_, err = w.Land(t.Context(), r)
		t.Setenv("PATH", path)
		if err == nil {
			t.Fatalf("land without a record, %s the branch changed: no error, want one", when)
		}
		c.sh("rm " + c.state + "; mv " + away + " " + c.state)
		w = c.open("s")
		if when == "before" {
			c.equal("files, if the branch has no commit", names(w), []string{"M a", "M b"})
			c.equal("choice, if the branch has no commit", w.Attempts()[0].Mark(0), review.All)
		}
	}
	c.equal("files", names(w), []string{"M b"})
	c.equal("chosen", w.Attempts()[0].Mark(0), review.None)
	c.git("branch -D review/s") // a user who has merged it
	c.equal("files without the branch", names(c.open("s")), []string{"M b"})
}

// A landing whose record was lost can be repeated.
func TestInterruptedLanding(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.agent("s", `echo 2 >>a`)
	w := c.open("s")
	if err := w.Attempts()[0].ChooseAll(true); err != nil {
		t.Fatal(err)
	}
	record, err := filepath.Glob(filepath.Join(c.state, "*.json"))
	if err != nil || len(record) != 1 {
		t.Fatalf("files with marks: %v, %v, want one", record, err)
	}
	before, err := os.ReadFile(record[0])
	if err != nil {
		t.Fatal(err)
	}
	tip := c.land(w, review.LandRequest{}).Tip
	if err := os.WriteFile(record[0], before, 0o600); err != nil {
		t.Fatal(err)
	}
	again := c.open("s")
	c.equal("files", names(again), []string{"M a"})
	done := c.land(again, review.LandRequest{})
	c.equal("landing", done, review.Landed{Branch: "review/s", Tip: tip, Message: "Land the work of s", Commits: []review.LandedCommit{{Session: "s", Files: []string{"a"}}}})
	c.equal("files in the end", names(again), []string{})
}

func TestRefusedBranches(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.agent("s", `echo 2 >>a`)
	w := c.open("s")
	for _, name := range []string{"main", "-x", "a..b", "HEAD", "refs/heads/x"} {
		if _, err := w.Land(t.Context(), review.LandRequest{Paths: []string{"."}, Branch: name}); err == nil {
			t.Errorf("land on %q: no error, want one", name)
		}
	}
	c.equal("main", c.git("rev-parse main"), c.base)
}

// Once, keys that were pressed during a landing changed what landed.
func TestMarksDuringLanding(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n", "b": "b\n"})
	c.agent("s", `echo 2 >>a; echo 2 >>b`)
	w := c.open("s")
	a := w.Attempts()[0]
	if err := a.ChooseFile(0, true); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	wg.Go(func() {
		for ctx.Err() == nil {
			a.Mark(0)
			a.Chosen(1, "x")
			if err := a.Choose(t.Context(), 0, false); err != nil {
				t.Errorf("choose: %v", err)
			}
		}
	})
	c.land(w, review.LandRequest{})
	cancel()
	wg.Wait()
	c.equal("branch", c.git("diff --name-only main review/s"), "a")
}

const token = "ghp_" + "vR8kQz3LmN0xWc5TbYd7HsJf2GpUe9AoZi4K"

func TestFindings(t *testing.T) {
	c := newClone(t, map[string]string{"old": "token = " + token[:20] + strings.Repeat("Q", 20) + "\n", "a": "a\n"})
	c.agent("s", `echo more >>old
printf 'x\ny = "`+token+`" # gitleaks:allow\n' >>a
head -c 11000000 /dev/urandom >big
echo ok >ok`)
	w := c.open("s")
	if err := w.Attempts()[0].ChooseAll(true); err != nil {
		t.Fatal(err)
	}
	_, err := w.Land(t.Context(), review.LandRequest{})
	found, ok := errors.AsType[*review.FindingsError](err)
	if !ok {
		t.Fatalf("land a secret and a large file: %v, want findings", err)
	}
	seen := []string{}
	for _, f := range found.Findings {
		seen = append(seen, f.Path+" "+f.Rule)
		if f.Path == "a" && f.Line != 3 {
			t.Errorf("line of the secret: %d, want 3", f.Line)
		}
	}
	c.equal("findings", seen, []string{"a github-pat", "big large-file"})
	if text := err.Error() + found.Findings[0].What; strings.Contains(text, token) {
		t.Errorf("the finding holds the secret: %s", text)
	}
	// Consent covers what the user saw, and nothing more.
	_, err = w.Land(t.Context(), review.LandRequest{Accept: found.Findings[:1]})
	if left, ok := errors.AsType[*review.FindingsError](err); !ok || len(left.Findings) != 1 || left.Findings[0].Path != "big" {
		t.Errorf("land with one of two findings accepted: %v, want the other", err)
	}
	c.agent("s", `echo 'z = "`+strings.Replace(token, "vR8", "wS9", 1)+`"' >>a`)
	if err := w.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.Attempts()[0].ChooseAll(true); err != nil {
		t.Fatal(err)
	}
	_, err = w.Land(t.Context(), review.LandRequest{Accept: found.Findings})
	if left, ok := errors.AsType[*review.FindingsError](err); !ok || len(left.Findings) != 1 || left.Findings[0].Line != 4 {
		t.Errorf("land a new secret with the old findings accepted: %v, want the new one", err)
	}
	if got := c.git("branch --list 'review/*'"); got != "" {
		t.Errorf("branches: %q, want none", got)
	}
	c.land(w, review.LandRequest{Unchecked: true})
}

// More findings than are reported at once do not hide the last one.
func TestManyFindings(t *testing.T) {
	c := newClone(t, nil)
	c.agent("s", `for i in $(seq 100 350); do echo "k$i = \"`+token[:37]+`$i\""; done >a; echo 'z = "`+token+`"' >z`)
	w := c.open("s")
	var accepted []review.Finding
	for seen := false; !seen; {
		_, err := w.Land(t.Context(), review.LandRequest{Paths: []string{"."}, Accept: accepted})
		found, ok := errors.AsType[*review.FindingsError](err)
		if !ok {
			t.Fatalf("land with %d findings accepted: %v, want the others", len(accepted), err)
		}
		accepted = append(accepted, found.Findings...)
		seen = slices.ContainsFunc(found.Findings, func(f review.Finding) bool { return f.Path == "z" })
	}
	c.land(w, review.LandRequest{Paths: []string{"."}, Accept: accepted})
}

func TestSecretInMessage(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.agent("s", `echo 2 >>a`)
	_, err := c.open("s").Land(t.Context(), review.LandRequest{Paths: []string{"."}, Message: "Use " + token})
	if _, ok := errors.AsType[*review.FindingsError](err); !ok {
		t.Errorf("land with a secret in the message: %v, want a finding", err)
	}
}

// Nothing that the agent committed, and no setting of the user that is meant for other work, makes git run a
// program or changes what the review reads.
func TestNothingRuns(t *testing.T) {
	c := newClone(t, map[string]string{"a": "1\n\n2\n3\n4\n5\n6\n7\n8\n9\n", "sub/b": "b\n"})
	trap := filepath.Join(t.TempDir(), "ran")
	run := "touch " + trap + "; cat"
	for _, setting := range []string{
		"merge.trap.driver", "filter.trap.clean", "filter.trap.smudge", "diff.trap.command", "diff.trap.textconv", "diff.external",
		"core.fsmonitor", "trailer.trap.command", "core.sshCommand", "gpg.program", "uploadpack.packObjectsHook", "core.alternateRefsCommand",
	} {
		c.git("config --global " + setting + " '" + run + "' && git config " + setting + " '" + run + "'")
	}
	c.git("config --global commit.gpgSign true && git config --global diff.suppressBlankEmpty true && git config --global diff.noprefix true && git config --global diff.renames false && git config --global color.ui always && git config --global diff.context 0")
	hooks := filepath.Join(t.TempDir(), "hooks")
	for _, name := range []string{"reference-transaction", "pre-commit", "commit-msg", "post-commit", "pre-push", "post-checkout", "post-index-change"} {
		hook := filepath.Join(hooks, name)
		if err := os.MkdirAll(hooks, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(hook, []byte("#!/bin/sh\n"+run+"\n"), 0o700); err != nil { //nolint:gosec // a hook
			t.Fatal(err)
		}
	}
	attributes := "* merge=trap filter=trap diff=trap text eol=crlf working-tree-encoding=UTF-16"
	c.sh("mkdir -p ../.config/git && echo '* merge=trap diff=trap' >../.config/git/attributes")
	// The agent's commit and the branch's are written by hand, because the user's git is full of traps.
	edit := func(ref string, files map[string]string) {
		index := filepath.Join(t.TempDir(), "index")
		env := "GIT_CONFIG_GLOBAL=/dev/null GIT_INDEX_FILE=" + index + " "
		git := env + "git -c core.fsmonitor=false "
		c.sh(git + "read-tree " + c.base)
		for name, content := range files {
			id := c.sh("printf '" + content + "' | " + git + "hash-object -w --stdin --no-filters")
			c.sh(git + "update-index --add --cacheinfo 100644," + id + "," + name)
		}
		tree := c.sh(git + "write-tree")
		commit := c.sh(env + "git -c user.name=x -c user.email=x@example.com -c core.fsmonitor=false commit-tree " + tree + " -p " + c.base + " -m x")
		c.sh(env + "git -c core.fsmonitor=false update-ref " + ref + " " + commit)
	}
	edit("refs/agents/s/HEAD", map[string]string{".gitattributes": attributes + "\\n", "sub/.gitattributes": attributes + "\\n", "a": "1\\n\\ntwo\\n3\\n4\\n5\\n6\\n7\\n8\\n9\\n", "sub/b": "agent\\n"})
	edit("refs/heads/review/s", map[string]string{"a": "1\\n\\n2\\n3\\n4\\n5\\n6\\n7\\n8\\nnine\\n", "sub/b": "branch\\n"})
	c.sh("git config core.hooksPath '" + hooks + "'")
	os.Remove(trap)

	w := c.open("s")
	a := w.Attempts()[0]
	for i := range a.Files() {
		if _, err := a.Patch(t.Context(), i); err != nil {
			t.Fatal(err)
		}
	}
	c.land(w, review.LandRequest{Paths: []string{"a", ".gitattributes", "sub/.gitattributes"}})
	_, err := w.Land(t.Context(), review.LandRequest{Paths: []string{"sub/b"}})
	conflict, ok := errors.AsType[*review.ConflictError](err)
	if !ok {
		t.Fatalf("land sub/b: %v, want a conflict", err)
	}
	c.sh("GIT_CONFIG_GLOBAL=/dev/null git config merge.tool theirs && git config mergetool.theirs.cmd 'cat \"$REMOTE\" >\"$MERGED\"' && git config mergetool.theirs.trustExitCode true && git config mergetool.prompt false")
	os.Remove(trap)
	c.sh("git config --global --unset core.fsmonitor") // the user's own git mergetool may run it
	resolved, err := w.MergeTool(t.Context(), conflict.Conflicts[0], review.Terminal{})
	if err != nil {
		t.Fatalf("run the merge tool: %v", err)
	}
	c.land(w, review.LandRequest{Paths: []string{"sub/b"}, Resolutions: []review.Resolution{resolved}})
	if _, err := os.Stat(trap); err == nil {
		t.Error("a program ran that a setting or an attribute names")
	}
	c.equal("a", c.sh("GIT_CONFIG_GLOBAL=/dev/null git show --no-textconv review/s:a | tr '\\n' ,"), "1,,two,3,4,5,6,7,8,nine,")
	c.equal("b", c.sh("git cat-file blob review/s:sub/b"), "agent")
}

func TestNotes(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.agent("s", `echo 2 >>a`)
	a := c.open("s").Attempts()[0]
	first, err := a.AddNote(review.Target{Path: "a", Line: 2, Quote: "2\x1b[31m"}, "Why?\nSay so.\x1b]0;x\a")
	if err != nil {
		t.Fatal(err)
	}
	prompt, notes := a.Prompt()
	c.equal("prompt", prompt, "Please address these remarks on your work, as of commit "+a.Head()[:12]+":\n\n- a:2 `2`\n  Why?\n  Say so.\n")
	// A note that is written while the first is sent stays unsent.
	second, err := a.AddNote(review.Target{Path: "a"}, "And this.")
	if err != nil {
		t.Fatal(err)
	}
	if err := a.MarkSent(notes); err != nil {
		t.Fatal(err)
	}
	_, left := c.open("s").Attempts()[0].Prompt()
	c.equal("unsent notes", left, []review.Note{second})
	if err := a.RemoveNote(second.ID); err != nil {
		t.Fatal(err)
	}
	if prompt, _ := a.Prompt(); prompt != "" {
		t.Errorf("prompt without notes: %q, want none", prompt)
	}
	c.equal("notes", a.Notes()[0].ID, first.ID)
	for range 10 { // they do not fit into one prompt
		if _, err := a.AddNote(review.Target{Path: "a"}, strings.Repeat("x", 3000)); err != nil {
			t.Fatal(err)
		}
	}
	prompt, notes = a.Prompt()
	if len(prompt) > 16_000 || len(notes) == 0 || len(notes) == 10 {
		t.Errorf("prompt of 10 long notes: %d bytes with %d notes, want at most 16000 bytes and some notes", len(prompt), len(notes))
	}
	if _, err := a.AddNote(review.Target{Path: "a"}, " \n"); fail.CodeOf(err) != fail.Usage {
		t.Errorf("empty note: %v, want a usage error", err)
	}
}

// An author's name cannot add trailers or characters that a terminal obeys.
func TestHostileAuthor(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.agent("s", `echo 2 >>a; git add -A; GIT_AUTHOR_NAME="$(printf 'Evil\033[31m')" GIT_AUTHOR_EMAIL='e@x> Signed-off-by: You <you@x' git commit -qm evil`)
	w := c.open("s")
	c.land(w, review.LandRequest{Paths: []string{"."}, Message: "Take it\n\nFixes: 12"})
	c.equal("message", c.git("log -1 --format=%B review/s"), "Take it\n\nFixes: 12\nCo-authored-by: An Agent <agent@example.com>\nCo-authored-by: Evil <e@x Signed-off-by: You you@x>\nAgent-Session: s\nAgent-Commit: "+c.git("rev-parse refs/agents/s/HEAD"))
}

// A session of an empty repository has no commit to start from.
func TestEmptyRepository(t *testing.T) {
	c := newClone(t, nil)
	c.agent("s", `echo 1 >a`)
	o := c.options("s")
	o.Sources[0].Base = repo.Base{}
	w := c.openWith(o)
	c.equal("files", names(w), []string{"A a"})
	c.land(w, review.LandRequest{Paths: []string{"."}})
	c.equal("branch", c.git("log --format=%s review/s"), "Land the work of s")
}
