package repo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Source is the repository that a push takes its history from.
type Source struct {
	Dir       string // a mirror or a local clone, on this host
	Local     bool   // Dir is the user's own clone: its branches are not the remote's
	URL       string // becomes the guest's origin; "" for none
	Branch    string // to check out; "" for the source's HEAD
	Commit    string // to put the branch at; "" for its current tip
	Session   string // whose fetched commits Commit may also name; "" for none
	NewBranch string // instead of Branch, which it begins at; "" for none
	Dirty     bool   // also copy a local clone's uncommitted and untracked files

	TempDir string // holds the packed history while it is sent; "" for the system's
}

// Source returns the mirror as the source of a push.
func (m Mirror) Source(dirty bool) Source {
	return Source{Dir: m.Dir, Local: m.Local, URL: m.Ref.URL, Branch: m.Ref.Branch, Commit: m.Ref.Commit, Dirty: dirty}
}

// Resolve returns s with the branch and the full commit id that would be checked
// out now. Later operations on the result use that commit, even if the branch
// moves. Commit stays "" for a repository without commits.
func (s Source) Resolve(ctx context.Context) (Source, error) {
	o, err := examine(ctx, s)
	s.Branch, s.Commit = o.branch, o.commit
	return s, err
}

// Checkout is the destination of a push.
type Checkout struct {
	Dir string // absolute, in the guest
}

const (
	extrasTime = 10 * time.Minute // for submodules and for LFS, each
	maxShallow = 1000             // commits at which a shallow clone ends
	maxProbe   = 4 << 10
)

// Push puts the source's whole history and a checkout of one branch into the guest.
// It may be repeated: it replaces an incomplete earlier attempt, and leaves a
// complete checkout as it is, whatever it contains now.
func Push(ctx context.Context, g Guest, src Source, dst Checkout, p Progress) (Base, error) {
	dir := path.Clean(dst.Dir)
	found, err := probeCheckout(ctx, g, dst)
	if err != nil {
		return Base{}, err
	}
	base := found.base
	if !found.done {
		finish := func(tmp string) error { return run(ctx, g, command(finishScript, tmp, dir)) }
		if base, err = transfer(ctx, g, src, dir, finish, p); err != nil {
			return Base{}, err
		}
	}
	if !found.extras {
		base.Warnings = append(base.Warnings, extras(ctx, g, dir, p)...)
	}
	return base, context.Cause(ctx)
}

// Started returns the base of the checkout in the guest. ok is false if no push to
// it has finished.
func Started(ctx context.Context, g Guest, dst Checkout) (base Base, ok bool, err error) {
	found, err := probeCheckout(ctx, g, dst)
	return found.base, found.done, err
}

func probeCheckout(ctx context.Context, g Guest, dst Checkout) (probe, error) {
	if err := checkDir(dst.Dir); err != nil {
		return probe{}, err
	}
	dir := path.Clean(dst.Dir)
	out, err := g.Output(ctx, command(probeScript, dir), nil, maxProbe)
	if err != nil {
		return probe{}, fmt.Errorf("find the checkout in the guest: %w", err)
	}
	return parseProbe(dir, string(out))
}

type probe struct {
	done, extras bool
	base         Base
}

func parseProbe(dir, out string) (probe, error) {
	f := strings.Fields(out)
	switch {
	case len(f) == 1 && f[0] == "absent":
		return probe{}, nil
	case len(f) == 1 && f[0] == "foreign":
		return probe{}, fail.New(fail.Conflict, "%s in the guest is neither empty nor a git checkout", dir).
			WithHint("agent-sessionizer exec SESSION -- ls -la %s", dir)
	case len(f) == 4 && f[0] == "done":
		r := probe{done: true, extras: f[3] == "yes"}
		if objectID.MatchString(f[1]) {
			r.base.Commit = f[1]
		}
		if validRefName(f[2]) && f[2] != "-" {
			r.base.Branch = f[2]
		}
		return r, nil
	}
	return probe{}, fmt.Errorf("find the checkout in the guest: unexpected output %q", clip(out))
}

// origin describes the history and checkout that a source offers.
type origin struct {
	kind    string // receive.sh's KIND
	remote  string // remote of a local clone
	branch  string
	commit  string
	head    string // the branch that HEAD names, "" if detached
	format  string
	shallow string
}

// transfer creates a checkout of src beside dir, which finish moves there.
func transfer(ctx context.Context, g Guest, src Source, dir string, finish func(tmp string) error, p Progress) (Base, error) {
	o, err := examine(ctx, src)
	if err != nil {
		return Base{}, err
	}
	if src.Dirty && (!src.Local || o.head != o.branch) {
		return Base{}, fail.New(fail.Usage, "uncommitted changes belong to the checked-out branch %q, not to %q", o.head, o.branch).
			WithHint("git -C %s switch %s", src.Dir, o.branch)
	}
	prefix := path.Join(path.Dir(dir), ".agent-push-"+path.Base(dir))
	tmp := prefix + "." + ids.New()
	if src.NewBranch != "" {
		o.branch = src.NewBranch
	}
	line := command(receiveScript+checkoutScript, tmp, prefix, src.URL, o.kind, o.remote, o.branch, o.commit, o.head, o.shallow, o.format)
	p.report("copying the history into the guest")
	if err := send(ctx, g, src, o, line, p); err != nil {
		return Base{}, fmt.Errorf("copy the repository into the guest: %w", err)
	}
	if src.Dirty {
		p.report("copying uncommitted changes")
		if err := sendDirty(ctx, g, src.Dir, o.commit, tmp); err != nil {
			return Base{}, fmt.Errorf("copy the uncommitted changes into the guest: %w", err)
		}
	}
	if err := finish(tmp); err != nil {
		return Base{}, fmt.Errorf("finish the checkout in the guest: %w", err)
	}
	return Base{Commit: o.commit, Branch: o.branch}, nil
}

var (
	plainRemote = lazyregexp.New(`^[A-Za-z0-9_-]+$`)
	abbreviated = lazyregexp.New(`^[0-9a-f]{7,64}$`)
)

// examine determines what to send and what to check out.
func examine(ctx context.Context, src Source) (origin, error) {
	g := hostGit{dir: src.Dir}
	o := origin{kind: "mirror"}
	format, err := g.output(ctx, "rev-parse", "--show-object-format")
	if err != nil {
		return o, localError(src.Dir, err)
	}
	o.format = strings.TrimSpace(format)
	if src.Local {
		o.kind = "clone"
		name, _, err := localRemote(ctx, src.Dir)
		if err != nil {
			return o, err
		}
		if src.URL != "" && plainRemote.MatchString(name) {
			o.remote = name
		}
		if out, err := g.query(ctx, "config", "--get-regexp", `^remote\..*\.promisor$|^extensions\.partialclone$`); err != nil {
			return o, err
		} else if out != "" {
			return o, fail.New(fail.Conflict, "%s is a partial clone; the objects that it lacks cannot be copied", src.Dir).
				WithHint("git -C %s fetch --refetch --no-filter # or open the remote instead of the clone", src.Dir)
		}
		if o.shallow, err = shallowEnds(ctx, g); err != nil {
			return o, err
		}
	}
	head, err := g.query(ctx, "symbolic-ref", "-q", "HEAD")
	if err != nil {
		return o, err
	}
	o.head = strings.TrimPrefix(strings.TrimSpace(head), "refs/heads/")
	refs, err := g.output(ctx, "for-each-ref", "--count=1", "refs/heads", "refs/tags", "refs/remotes")
	if err != nil {
		return o, err
	}
	o.branch = o.head
	if src.Branch != "" {
		o.branch = src.Branch
	}
	if o.branch != "" && !validRefName(o.branch) {
		return o, fail.New(fail.Usage, "invalid branch name %q", o.branch).WithHint("git -C %s branch -m NAME", src.Dir)
	}
	if err := o.resolve(ctx, g); err != nil {
		return o, err
	}
	switch {
	case o.commit != "":
	case src.Branch != "" && (refs != "" || src.Branch != o.head):
		return o, fail.New(fail.NotFound, "branch %q does not exist", src.Branch).WithHint("git -C %s branch --all", src.Dir)
	case refs == "":
		o.kind = "empty"
	case !src.Local:
		// The remote's HEAD names a branch that does not exist.
		if err := o.fallback(ctx, g); err != nil {
			return o, err
		}
	}
	if src.Commit != "" && src.Commit != o.commit {
		if o.commit, err = pinned(ctx, g, src.Commit, src.Session); err != nil {
			return o, err
		}
	}
	return o, nil
}

// pinned returns the commit of that name, if it is in the history that will be
// sent. That includes what was fetched from a session, unless session is "".
func pinned(ctx context.Context, g hostGit, name, session string) (string, error) {
	unknown := fail.New(fail.NotFound, "commit %q is not in the history of a branch or tag", clip(name)).WithHint("git -C %s log --all --oneline", g.dir)
	if !abbreviated.MatchString(name) {
		return "", unknown
	}
	out, err := g.query(ctx, "rev-parse", "-q", "--verify", name+"^{commit}")
	if err != nil || out == "" {
		return "", errors.Join(unknown, err)
	}
	commit := strings.TrimSpace(out)
	among := []string{"refs/heads", "refs/tags", "refs/remotes"}
	if sessionName.MatchString(session) {
		among = append(among, "refs/agents/"+session)
	}
	if refs, err := g.output(ctx, append([]string{"for-each-ref", "--count=1", "--contains", commit}, among...)...); err != nil || refs == "" {
		return "", errors.Join(unknown, err)
	}
	return commit, nil
}

// resolve finds the commit to check out, "" if there is none yet.
func (o *origin) resolve(ctx context.Context, g hostGit) error {
	names := []string{"HEAD"}
	if o.branch != "" {
		names = []string{"refs/heads/" + o.branch}
		if o.remote != "" {
			names = append(names, "refs/remotes/"+o.remote+"/"+o.branch)
		}
	}
	for _, name := range names {
		out, err := g.query(ctx, "rev-parse", "-q", "--verify", name+"^{commit}")
		if o.commit = strings.TrimSpace(out); err != nil || out != "" {
			return err
		}
	}
	return nil
}

func (o *origin) fallback(ctx context.Context, g hostGit) error {
	out, err := g.output(ctx, "for-each-ref", "--count=1", "--sort=-committerdate", "--format=%(refname:lstrip=2)", "refs/heads")
	if err != nil {
		return err
	}
	o.branch = strings.TrimSpace(out)
	if o.branch == "" || !validRefName(o.branch) {
		return fail.New(fail.NotFound, "the repository has no branch to check out").WithHint("git -C %s for-each-ref", g.dir)
	}
	return o.resolve(ctx, g)
}

// shallowEnds returns the commits whose parents a shallow clone lacks.
func shallowEnds(ctx context.Context, g hostGit) (string, error) {
	name, err := g.output(ctx, "rev-parse", "--path-format=absolute", "--git-path", "shallow")
	if err != nil {
		return "", err
	}
	data, err := os.ReadFile(strings.TrimSuffix(name, "\n"))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read a shallow clone: %w", err)
	}
	ends := strings.Fields(string(data))
	if len(ends) > maxShallow {
		return "", fail.New(fail.Conflict, "%s is a shallow clone that ends at %d commits", g.dir, len(ends)).
			WithHint("git -C %s fetch --unshallow", g.dir)
	}
	return strings.Join(ends, "\n"), nil
}

// pipeGit pipes the output of a git on the host into a command in the guest.
func pipeGit(ctx context.Context, g Guest, git hostGit, args []string, line string) error {
	return pipeInto(ctx, g, line, func(ctx context.Context, w io.Writer) error {
		git.stdout = w
		return git.run(ctx, args...)
	})
}

// pipeInto runs a command in the guest on what write writes. Both have ended when it returns.
func pipeInto(ctx context.Context, g Guest, line string, write func(context.Context, io.Writer) error) error {
	r, w, err := os.Pipe() // which a git can have as its output: then nothing limits how long the guest may pause
	if err != nil {
		return fmt.Errorf("send to the guest: %w", err)
	}
	writeCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	written := make(chan error, 1)
	go func() {
		err := write(writeCtx, w)
		_ = w.Close()
		written <- err
	}()
	guestStderr := &tailBuffer{keep: maxText}
	runErr := g.Run(ctx, line, ssh.IO{Stdin: r, Stderr: guestStderr})
	if runErr != nil {
		cancel()
	}
	_ = r.Close() // ends a write that still waits
	writeErr := <-written
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case runErr == nil:
		return writeErr
	}
	// A source that cannot be read ends the stream early, and then the command in
	// the guest fails too: report the source's error.
	ge, isGit := errors.AsType[*gitError](writeErr)
	if isGit && ge.code > 0 && !strings.Contains(ge.stderr, "pack-objects died") ||
		!isGit && writeErr != nil && !errors.Is(writeErr, syscall.EPIPE) && !errors.Is(writeErr, context.Canceled) {
		return writeErr
	}
	return guestError(runErr, guestStderr)
}

// run runs a command whose output matters only if it fails.
func run(ctx context.Context, g Guest, line string) error {
	stderr := &tailBuffer{keep: maxText}
	return guestError(g.Run(ctx, line, ssh.IO{Stderr: stderr}), stderr)
}

func guestError(err error, stderr *tailBuffer) error {
	if err == nil {
		return nil
	}
	if text := clip(stderr.String()); text != "" {
		return fmt.Errorf("%w: the guest reported: %s", err, text)
	}
	return err
}

// extras fetches submodules and LFS objects from inside the guest. A failure is
// only a warning.
func extras(ctx context.Context, g Guest, dir string, p Progress) []string {
	warnings, err := reported(ctx, g, command(extrasScript, dir, strconv.Itoa(int(extrasTime.Seconds()))), p)
	if err != nil && ctx.Err() == nil {
		warnings = append(warnings, "submodules and LFS objects could not be fetched: "+clip(err.Error()))
	}
	for _, w := range warnings {
		p.report("warning: %s", w)
	}
	return warnings
}

// reported runs a command in the guest that prints "step TEXT" and "warning TEXT", and returns the warnings.
func reported(ctx context.Context, g Guest, line string, p Progress) (warnings []string, err error) {
	out := &lineWriter{each: func(s string) {
		kind, text, _ := strings.Cut(s, " ")
		switch text = clip(text); kind {
		case "step":
			p.report("%s", text)
		case "warning":
			warnings = append(warnings, text)
		}
	}}
	stderr := &tailBuffer{keep: maxText}
	err = guestError(g.Run(ctx, line, ssh.IO{Stdout: out, Stderr: stderr}), stderr)
	return warnings, err
}

// lineWriter passes on the first lines of its input, each cut to a bound.
type lineWriter struct {
	each func(string)
	line []byte
	seen int
}

func (l *lineWriter) Write(p []byte) (int, error) {
	for _, c := range p {
		switch {
		case c != '\n' && len(l.line) < 1024:
			l.line = append(l.line, c)
		case c == '\n':
			if l.seen++; l.seen <= 32 {
				l.each(string(l.line))
			}
			l.line = l.line[:0]
		}
	}
	return len(p), nil
}
