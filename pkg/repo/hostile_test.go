package repo

import (
	"bytes"
	"compress/zlib"
	"context"
	"crypto/sha1" //nolint:gosec // git uses it
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// liar is a guest that answers anything.
type liar struct {
	answer map[string]func(w io.Writer) // by script
}

func (l *liar) Run(ctx context.Context, cmd string, st ssh.IO) error {
	for script, f := range l.answer {
		if strings.Contains(cmd, ssh.Quote(libScript+script)) {
			w := &untilDone{ctx: ctx, w: st.Stdout}
			f(w)
			return ctx.Err()
		}
	}
	return &ssh.ExitError{Code: 127}
}

func (l *liar) Output(ctx context.Context, cmd string, stdin io.Reader, limit int64) ([]byte, error) {
	var out bytes.Buffer
	w := &pipe.Writer{W: &out, Left: limit}
	err := l.Run(ctx, cmd, ssh.IO{Stdin: stdin, Stdout: w})
	return out.Bytes(), err
}

type untilDone struct {
	ctx context.Context
	w   io.Writer
	err error
}

func (u *untilDone) Write(p []byte) (int, error) {
	if u.err == nil {
		u.err = u.ctx.Err()
	}
	if u.err != nil {
		return 0, u.err
	}
	var n int
	n, u.err = u.w.Write(p)
	return n, u.err
}

func says(text string) func(io.Writer) {
	return func(w io.Writer) { _, _ = io.WriteString(w, text) }
}

// The malicious programs record in whose home they ran; only the guest's is
// allowed.
const evil = `#!/bin/sh
touch "$HOME/pwned"
cat
`

func TestAHostileRepositoryRunsNothingOnTheHost(t *testing.T) {
	s := start(t)
	// Also test a clone that would fetch submodules.
	host(t, s.into.Local, "git config fetch.recurseSubmodules true && git config submodule.recurse true && git config protocol.allow always")
	before := state(t, s.into.Local)
	prog := filepath.Join(s.g.home, "evil")
	write(t, prog, evil)
	tip := s.agent(t, `chmod +x ~/evil
		for h in post-checkout pre-push reference-transaction post-index-change pre-auto-gc update post-update proc-receive; do cp ~/evil .git/hooks/$h; done
		git config core.fsmonitor ~/evil; git config core.sshCommand ~/evil; git config core.alternateRefsCommand ~/evil; git config uploadpack.packObjectsHook ~/evil
		git config remote.origin.url "ext::`+prog+` %S"; git config remote.origin.vcs ext; git config protocol.ext.allow always
		git config filter.evil.clean ~/evil; git config filter.evil.smudge ~/evil; git config filter.evil.process ~/evil; git config diff.evil.textconv ~/evil; git config diff.evil.command ~/evil
		git config core.pager ~/evil; git config core.editor ~/evil; git config gpg.program ~/evil; git config credential.helper "!`+prog+`"
		git config include.path ~/evil.config; echo '[alias] status = !~/evil' >~/evil.config
		git config --unset filter.evil.process
		echo '* filter=evil diff=evil merge=evil' >.gitattributes
		printf '[submodule "x"]\n\tpath = x\n\turl = ext::`+prog+`\n' >.gitmodules
		git update-index --add --cacheinfo 160000,$(git rev-parse HEAD),x
		ln -s ../../../../../../etc/passwd up; ln -s .git/config link
		git add .gitattributes .gitmodules up link; git commit -qm evil; echo more >>a; git rev-parse HEAD`)
	s.fetch(t)
	s.work(t)
	s.diff(t, DiffOptions{})
	equal(t, "the user's clone", state(t, s.into.Local), before)
	equal(t, "tip", host(t, s.into.Local, "git rev-parse refs/agents/s1/HEAD"), tip)
	if _, err := os.Stat(filepath.Join(os.Getenv("HOME"), "pwned")); err == nil {
		t.Error("program of the guest ran as the host's user, want no program run")
	}
	if _, err := os.Stat(filepath.Join(s.g.home, "pwned")); err != nil {
		t.Error("program of the trap did not run in the guest, want it run: the trap does not work")
	}
}

func TestFetchRefusesTreesThatWouldBecomeGitDirectories(t *testing.T) {
	s := start(t)
	for _, name := range []string{".git", ".GIT", ".gIt", "git~1", "GIT~1", ".git ", ".git.", ".g\u200cit", "..", ".", `.git\x`, "a/b"} {
		t.Run(name, func(t *testing.T) {
			blob := s.agent(t, "echo x | git hash-object -w --stdin")
			s.evilTree(t, "40000", name, s.tree(t, "100644", "hooks", blob))
			s.refused(t)
		})
	}
	for _, name := range []string{".gitmodules", ".GITMODULES", ".git", "gitmod~1"} {
		t.Run("a symlink "+name, func(t *testing.T) {
			s.evilTree(t, "120000", name, s.agent(t, "printf /etc/passwd | git hash-object -w --stdin"))
			s.refused(t)
		})
	}
	for what, module := range map[string]string{
		"name": `[submodule "../../x"]\n\tpath = x\n\turl = ./x`, "url": `[submodule "x"]\n\turl = -oProxyCommand=id`, "path": `[submodule "x"]\n\tpath = -x\n\turl = ./x`,
	} {
		t.Run("a submodule's "+what, func(t *testing.T) {
			s.agent(t, `blob=$(printf '`+module+`\n' | git hash-object -w --stdin)
				tree=$(printf '100644 blob %s\t.gitmodules\n' $blob | git mktree) && git update-ref refs/heads/evil $(git commit-tree -m evil $tree)`)
			s.refused(t)
		})
	}
}

// tree creates a tree with one entry of any name.
func (s session) tree(t *testing.T, mode, name, id string) string {
	t.Helper()
	raw, err := hex.DecodeString(id)
	if err != nil {
		t.Fatal(err)
	}
	entry := base64.StdEncoding.EncodeToString(append([]byte(mode+" "+name+"\x00"), raw...))
	return s.agent(t, "echo "+entry+" | base64 -d | git hash-object -t tree -w --literally --stdin")
}

func (s session) evilTree(t *testing.T, mode, name, id string) {
	t.Helper()
	s.agent(t, "git update-ref refs/heads/evil $(git commit-tree -m evil "+s.tree(t, mode, name, id)+")")
}

// refused checks that a fetch fails and changes nothing.
func (s session) refused(t *testing.T) {
	t.Helper()
	res, err := Fetch(t.Context(), s.g, s.g.dir(), "s1", s.into, s.base, FetchOptions{})
	if err == nil || !strings.Contains(err.Error(), "refused") || fail.HintOf(err) == "" {
		t.Errorf("Fetch = %+v, %v, want \"refused\" with a hint", res, err)
	}
	for _, dir := range []string{s.into.Mirror, s.into.Local} {
		equal(t, "references", refs(t, dir), "")
	}
}

func TestFetchFromALiar(t *testing.T) {
	s := start(t)
	id := s.base.Commit
	other := strings.Repeat("ab", 20)
	for name, tc := range map[string]struct{ offer, refs string }{
		"names of the host's own": {"ref " + id + " refs/heads/x\nref " + id + " refs/agents/other/HEAD\nref " + id + " refs/remotes/origin/main\nend\n", "heads/x unnamed/" + id},
		"paths":                   {"ref " + id + " refs/heads/../../../config\nref " + id + " ../../HEAD\nref " + id + " refs/heads/.git/x\nend\n", "unnamed/" + id},
		"options":                 {"ref " + id + " --upload-pack=id\nref " + id + " refs/heads/-x\nref " + id + " refs/heads/a --no-deref\nend\n", "unnamed/" + id},
		"control bytes":           {"ref " + id + " refs/heads/a\x00b\nref " + id + " refs/heads/\x1b[31m\nref " + id + " refs/heads/\xff\nend\n", "unnamed/" + id},
		"too long":                {"ref " + id + " refs/heads/" + strings.Repeat("x", 250) + "\nend\n", "unnamed/" + id},
		"in each other's way":     {"ref " + id + " refs/heads/a\nref " + id + " refs/heads/a/b\nend\n", "heads/a unnamed/" + id},
		"one name but for case":   {"ref " + id + " refs/heads/Foo\nref " + id + " refs/heads/foo\nend\n", "heads/Foo unnamed/" + id},
		"case of a directory":     {"ref " + id + " refs/heads/A/b\nref " + id + " refs/heads/a\nend\n", "heads/A/b unnamed/" + id},
		"case of a parent":        {"ref " + id + " refs/heads/A\nref " + id + " refs/heads/a/b\nend\n", "heads/A unnamed/" + id},
		"one name in two forms":   {"ref " + id + " refs/heads/e\u0301\nref " + id + " refs/heads/\u00e9\nend\n", "heads/e\u0301 unnamed/" + id},
		"a lock file's name":      {"ref " + id + " refs/heads/x.LOCK\nref " + id + " refs/heads/y.Lock/z\nend\n", "unnamed/" + id},
		"no end":                  {"ref " + id + " refs/heads/x\n", ""},
		"after the end":           {"end\nref " + id + " refs/heads/x\nend\n", ""},
		"not an object":           {"ref --all refs/heads/x\nend\n", ""},
		"half an object":          {"head " + id[:39] + "\nend\n", ""},
		"commands":                {"ref " + id + " refs/heads/x\ndelete refs/heads/main\nend\n", ""},
		"nothing":                 {"", ""},
		"an object it has not":    {"head " + other + "\nend\n", ""},
		"another format":          {"head " + strings.Repeat("ab", 32) + "\nend\n", ""},
		"too much":                {strings.Repeat("ref "+id+" refs/heads/x\n", 400_000), ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := &liar{answer: map[string]func(io.Writer){offerScript: says(tc.offer), packScript: says("")}}
			local := filepath.Join(t.TempDir(), "clone")
			host(t, "/", "cp -a '"+s.into.Local+"' '"+local+"'")
			before := state(t, local)
			_, err := Fetch(t.Context(), l, s.g.dir(), "s1", Target{Local: local}, s.base, FetchOptions{})
			if (tc.refs == "") != (err != nil) {
				t.Errorf("Fetch = %v, want an error: %t", err, tc.refs == "")
			}
			equal(t, "references", refs(t, local), tc.refs)
			equal(t, "the user's clone", state(t, local), before)
		})
	}
}

func TestFetchOfBadPacks(t *testing.T) {
	s := start(t)
	tip := s.agent(t, "echo x >x && git add x && git commit -qm x && git rev-parse HEAD")
	raw, err := s.g.Output(t.Context(), "cd work/repo && printf 'HEAD\\n^HEAD~1\\n' | git pack-objects --revs --thin --stdout -q", nil, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(raw)
	flipped[len(flipped)/2] ^= 0x40
	lacking, err := s.g.Output(t.Context(), "cd work/repo && git rev-parse HEAD | git pack-objects --stdout -q", nil, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	count := bytes.Clone(raw)
	binary.BigEndian.PutUint32(count[8:], 0xffffffff)
	for name, send := range map[string]func(io.Writer){
		"nothing":             says(""),
		"text":                says("hello"),
		"a bundle":            func(w io.Writer) { _, _ = fmt.Fprintf(w, "# v2 git bundle\n%s refs/heads/main\n\n%s", tip, raw) },
		"truncated":           func(w io.Writer) { _, _ = w.Write(raw[:len(raw)-7]) },
		"corrupt":             func(w io.Writer) { _, _ = w.Write(flipped) },
		"more after it":       func(w io.Writer) { _, _ = w.Write(append(bytes.Clone(raw), "junk"...)) },
		"a commit, no tree":   func(w io.Writer) { _, _ = w.Write(lacking) },
		"a false count":       func(w io.Writer) { _, _ = w.Write(count) },
		"an object of 16 GiB": func(w io.Writer) { _, _ = w.Write(bomb(t)) },
		"no end": func(w io.Writer) {
			for {
				if _, err := w.Write(make([]byte, 1<<16)); err != nil {
					return
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := &liar{answer: map[string]func(io.Writer){offerScript: says("head " + tip + "\nend\n"), packScript: send}}
			before := state(t, s.into.Local)
			res, err := Fetch(t.Context(), l, s.g.dir(), "s1", s.into, s.base, FetchOptions{MaxBytes: 32 << 20})
			if err == nil {
				t.Errorf("Fetch of a bad pack = %+v, nil, want an error", res)
			}
			for _, dir := range []string{s.into.Mirror, s.into.Local} {
				equal(t, "references", refs(t, dir), "")
				host(t, dir, "git fsck --strict --no-dangling && test -z \"$(find . -name 'tmp_*')\"")
			}
			equal(t, "the user's clone", state(t, s.into.Local), before)
		})
	}
	s.fetch(t) // the real one still arrives
	equal(t, "tip", host(t, s.into.Local, "git rev-parse refs/agents/s1/HEAD"), tip)
}

// bomb returns a pack of a few kilobytes with a delta that would expand to 16 GiB.
func bomb(t *testing.T) []byte {
	t.Helper()
	const baseSize, copies = 0xffffff, 1024
	var pack bytes.Buffer
	pack.WriteString("PACK")
	_ = binary.Write(&pack, binary.BigEndian, []uint32{2, 2})
	object := func(kind byte, data []byte, ref []byte) {
		n := len(data)
		c := kind<<4 | byte(n&15)
		for n >>= 4; n > 0; n >>= 7 {
			pack.WriteByte(c | 0x80)
			c = byte(n & 0x7f)
		}
		pack.WriteByte(c)
		pack.Write(ref)
		z := zlib.NewWriter(&pack)
		_, _ = z.Write(data)
		_ = z.Close()
	}
	base := make([]byte, baseSize)
	object(3, base, nil)
	varint := func(n uint64) (b []byte) {
		for ; n > 0x7f; n >>= 7 {
			b = append(b, byte(n)|0x80)
		}
		return append(b, byte(n))
	}
	delta := append(varint(baseSize), varint(baseSize*copies)...)
	for range copies {
		delta = append(delta, 0xf0, 0xff, 0xff, 0xff) // copy 0xffffff bytes from 0
	}
	id := sha1.Sum(append(fmt.Appendf(nil, "blob %d\x00", baseSize), base...)) //nolint:gosec // git uses it
	object(7, delta, id[:])
	sum := sha1.Sum(pack.Bytes()) //nolint:gosec // git uses it
	pack.Write(sum[:])
	return pack.Bytes()
}

func TestWorkFromALiar(t *testing.T) {
	id := strings.Repeat("ab", 20)
	for name, answer := range map[string]string{
		"nothing": "", "no end": "ahead 0\n", "a negative count": "ahead -1\nend\n", "a huge count": "dirty 99999999999999999999\nend\n",
		"no count": "stashes\nend\n", "another key": "evil 1\nend\n", "no object": "ref x 1 main\nend\n", "after the end": "end\nahead 0\n",
	} {
		l := &liar{answer: map[string]func(io.Writer){workScript: says(answer)}}
		if w, err := Work(t.Context(), l, "/x/y", Base{}); err == nil {
			t.Errorf("Work with %s = %+v, nil, want an error", name, w)
		}
	}
	l := &liar{answer: map[string]func(io.Writer){workScript: says("head " + id + "\nbranch \x1b[31mred\nref " + id + " 2 a\x1b]0;x\x07b\nprogress \x1b[2J\nahead 2\nend\n")}}
	w, err := Work(t.Context(), l, "/x/y", Base{})
	if err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(fmt.Sprint(w, w.Summary()), "\x1b\x07") || w.Clean() {
		t.Errorf("Work = %+v, want it not clean, without control bytes", w)
	}
}

func TestPushToALiar(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	mirror := ensure(t, mirrors(t), ref)
	for name, tc := range map[string]struct{ probe, base string }{
		"options":  {"done --output=x --exec=y yes\n", "{  []}"},
		"escapes":  {"done \x1b[31m \x1b[31m yes\n", "{  []}"},
		"nothing":  {"", ""},
		"too much": {strings.Repeat("done ", 10000), ""},
	} {
		l := &liar{answer: map[string]func(io.Writer){probeScript: says(tc.probe)}}
		base, err := Push(t.Context(), l, mirror.Source(false), Checkout{Dir: "/x/y"}, nil)
		if (tc.base == "") != (err != nil) || err == nil && fmt.Sprint(base) != tc.base {
			t.Errorf("Push with %s = %+v, %v, want %q", name, base, err, tc.base)
		}
		if err != nil && strings.ContainsAny(err.Error(), "\x1b") {
			t.Errorf("error of Push with %s = %q, want no escape", name, err)
		}
	}
}
