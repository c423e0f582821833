// Package picker shows the list from which a user chooses: first sessions, ordered by
// how urgently they need attention, then repositories without a session. It runs fzf in
// this process, keeps the rows up to date with the store while the list is open, and
// draws the preview.
//
// It reads the store and files, and calls a function for the sessions of other hosts. It
// accesses no guest, no VM and no network, and it carries out nothing: the command line does, using the rows' keys. Everything that it
// shows may come from a guest or a repository, and is made harmless first.
package picker

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"strings"
	"sync"
	"time"

	fzf "github.com/junegunn/fzf/src"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Command is the hidden command that fzf runs for keys and the preview: Command ACTION
// [KEY…].
const Command = "picker"

// Actions of Command.
const (
	ActionPreview = "preview" // of a row
	ActionTyped   = "typed"   // Enter when no row matches
	ActionNew     = "new"     // another session of the row's repository
	ActionOpen    = "open"    // and stay in the picker
	ActionStop    = "stop"
	ActionDestroy = "destroy" // shows ActionAsk
	ActionAsk     = "ask"     // asks whether to destroy
	ActionCopy    = "copy"    // the ssh command
	ActionAnswer  = "answer"  // shows ActionReply
	ActionReply   = "reply"   // shows what agents ask, and reads the answers
)

// Environment variables of Command, besides fzf's own. They keep the shell commands
// constant, so that no path has to be quoted in them.
const (
	selfVar   = "AGENT_SESSIONIZER_PICKER"
	rowsVar   = "AGENT_SESSIONIZER_PICKER_ROWS"
	clientVar = "AGENT_SESSIONIZER_PICKER_CLIENT"
)

// Picker is one picker, or one command that fzf runs for it. Only one goroutine may
// call its methods.
type Picker struct {
	Manager *session.Manager
	Console *console.Console
	Listed  []string // the lines of repos.txt
	Client  string   // tmux client to pick for, "" if unknown
	Unicode bool     // see the function Unicode

	// Others returns the sessions on the other hosts of the cluster that answer. It may take seconds, and is
	// called again and again while the picker is open. It is nil outside a cluster.
	Others func(context.Context) map[string][]session.View
	// Environ has further environment variables for the commands that fzf runs.
	Environ map[string]string

	others     *others
	clones     cloneCacheReader
	endedLast  []session.Session
	endedFor   string
	endedKnown bool
}

// New returns a Picker for the sessions of m.
func New(m *session.Manager, con *console.Console, listed []string) *Picker {
	return &Picker{
		Manager: m, Console: con, Listed: listed, Unicode: Unicode(os.Getenv),
		others: &others{hosts: map[string]report{}},
		clones: cloneCacheReader{file: cloneCache(m.Config.Paths), roots: m.Config.Roots},
	}
}

// Client returns the tmux client of the picker that started this command.
func Client() string { return os.Getenv(clientVar) }

// Unicode reports whether the locale supports more than ASCII.
func Unicode(env func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := env(name); v != "" {
			v = strings.ToLower(v)
			return strings.Contains(v, "utf-8") || strings.Contains(v, "utf8")
		}
	}
	return false
}

// Pick is the user's choice.
type Pick struct {
	New  bool     // create other sessions of the repositories of Open
	Open []Target // in the order in which they were marked; the first is attached
	Exit int      // fzf's exit status if nothing was chosen
}

// Run shows the picker until the user makes a choice. It may be called only once per
// process, because of how fzf is built.
func (p *Picker) Run(ctx context.Context) (Pick, error) {
	lines, observations, err := p.now(ctx)
	if err != nil {
		return Pick{}, err
	}
	r, err := newPickerDir()
	if err != nil {
		return Pick{}, err
	}
	defer r.remove() //nolint:errcheck // the next picker removes leftovers

	opts, err := p.options(r)
	if err != nil {
		return Pick{}, err
	}
	opts.Input = make(chan string, len(lines))
	for _, l := range lines {
		opts.Input <- l
	}
	close(opts.Input)
	opts.Output = make(chan string)
	var out []string
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for line := range opts.Output {
			out = append(out, line)
		}
	})
	restore := p.setenv(r)
	defer restore()
	following, stop := context.WithCancel(ctx)
	if p.Others != nil {
		tasks.Go(func() { p.others.follow(following, p.Others) })
	}
	tasks.Go(func() { p.follow(following, r, strings.Join(lines, "\n"), observations) })

	code, err := fzf.Run(opts)
	close(opts.Output)
	stop()
	tasks.Wait()
	if err != nil {
		return Pick{}, fail.New(fail.Host, "fzf: %w", err)
	}
	return picked(code, out)
}

// picked parses fzf's output: the query, the words of the actions that were used, and the keys of
// rows. Rows may disappear before an action takes effect; then another action follows, and its
// word counts.
func picked(code int, out []string) (Pick, error) {
	if code != fzf.ExitOk && code != fzf.ExitNoMatch || len(out) == 0 {
		return Pick{Exit: code}, nil
	}
	query, rest := out[0], out[1:]
	word := ""
	for _, line := range rest {
		if line == ActionTyped || line == ActionNew || line == ActionOpen {
			word = line
		}
	}
	if word == ActionTyped {
		open, ok := Typed(query)
		if !ok {
			return Pick{}, fail.New(fail.Usage, "%q is not a repository", query)
		}
		return Pick{Open: []Target{{Repo: open}}}, nil
	}
	pick := Pick{New: word == ActionNew}
	for _, key := range rest {
		if t, ok := ParseKey(key); ok {
			pick.Open = append(pick.Open, t)
		}
	}
	if len(pick.Open) == 0 {
		pick.Exit = fzf.ExitNoMatch
	}
	return pick, nil
}

// now returns the current rows, and a sum that changes whenever the content of
// previews does.
func (p *Picker) now(ctx context.Context) (lines []string, observations string, err error) {
	states, repos, err := p.read(ctx)
	if err != nil {
		return nil, "", err
	}
	sum := sha256.New()
	for _, s := range states {
		fmt.Fprintf(sum, "%s %d %s ", s.ID, s.seen.UnixNano(), s.Message())
	}
	return p.lines(states, repos, time.Now()), string(sum.Sum(nil)), nil
}

const (
	header = "enter open  tab mark  ^o stay  ^s stop  ^x destroy\n" +
		"^y copy ssh  ? preview  ^t new  alt-enter typed"
	self = `"$` + selfVar + `" ` + Command + ` `
)

func (p *Picker) options(r *workDir) (*fzf.Options, error) {
	args := []string{
		"--ansi", "--multi", "--layout=reverse", "--info=hidden", "--prompt=> ",
		"--ghost=a session, or owner/repo, a git URL, ./path", "--header=" + header,
		"--with-shell=sh -c", "--listen=" + r.socket(),
		// The key of a row is for this program, the rest is for people.
		"--delimiter=\t", "--with-nth=2", "--accept-nth=1", "--id-nth=1", "--print-query",
		// Without a query the rows keep our order; with one, better matches come first.
		"--scheme=default", "--tiebreak=index",
		"--preview=" + self + ActionPreview + " {1}",
		"--preview-window=right,50%,border-left,<50(down,50%,border-top)",

		// A cursor that follows its row is right when rows are added and removed, but
		// wrong while the user types a query. So --track is not always on: see follow.
		"--bind=change:untrack-current+first+change-header[" + header + "]",
		"--bind=focus:transform(" + skipLine + ")",
		// A key applies to the row that matches what was typed before it, even if that
		// row is not on the screen yet.
		"--bind=enter:wait+transform(" + enterKey + ")",
		"--bind=double-click:wait+transform(" + enterKey + ")",
		"--bind=alt-enter:transform(" + self + ActionTyped + ")",
		"--bind=ctrl-t:wait+transform(" + newKey + ")",
		"--bind=ctrl-o:wait+bg-transform(" + self + ActionOpen + " {+1})+clear-multi",
		"--bind=ctrl-s:wait+bg-transform(" + self + ActionStop + " {+1})+clear-multi",
		"--bind=ctrl-x:wait+bg-transform(" + self + ActionDestroy + " {+1})+clear-multi",
		"--bind=ctrl-r:wait+bg-transform(" + self + ActionAnswer + " {+1})+clear-multi",
		"--bind=ctrl-y:wait+bg-transform(" + self + ActionCopy + " {1})",
		"--bind=?:toggle-preview",
	}
	if !p.Unicode {
		args = append(args, "--no-unicode")
	}
	// Use only the colours of the user's own fzf settings: a key binding or option
	// could make the picker do something else.
	theirs, theirErr := fzf.ParseOptions(true, nil)
	if !p.Console.Color() {
		args = append(args, "--no-color")
	}
	opts, err := fzf.ParseOptions(false, args)
	if err != nil {
		return nil, fmt.Errorf("fzf: %w", err)
	}
	if p.Console.Color() && theirErr == nil {
		opts.Theme, opts.BaseTheme = theirs.Theme, theirs.BaseTheme
	}
	return opts, nil
}

const (
	// skipLine moves the cursor over the separator line, in the direction in which it
	// came.
	skipLine = `[ x{1} != x- ] || case "$FZF_ACTION" in *up*|*prev*) echo up;; *) echo down;; esac`
	// Rows may disappear between the check and the acceptance, and a plain accept would
	// then end fzf without a result.
	enterKey = `if [ "$FZF_MATCH_COUNT$FZF_SELECT_COUNT" = 00 ]; then ` + self + ActionTyped + `; elif [ x{1} != x- ]; then echo "print<` + ActionOpen + `>+accept-non-empty"; fi`
	newKey   = `[ "$FZF_MATCH_COUNT$FZF_SELECT_COUNT" = 00 ] || [ x{1} = x- ] || echo "print<` + ActionNew + `>+accept-non-empty"`
)

// setenv sets the environment for the commands that fzf runs; restore undoes that.
func (p *Picker) setenv(r *workDir) (restore func()) {
	vars := map[string]string{selfVar: p.Manager.Self, rowsVar: r.rows(), clientVar: p.Client}
	maps.Copy(vars, p.Environ)
	if p.Console.Color() {
		vars["CLICOLOR_FORCE"] = "1" // the preview's output is a pipe
	}
	var undo []func()
	for name, value := range vars {
		before, had := os.LookupEnv(name)
		undo = append(undo, func() {
			if had {
				_ = os.Setenv(name, before) // it was valid before
			} else {
				_ = os.Unsetenv(name)
			}
		})
		_ = os.Setenv(name, value) // fails only for invalid names
	}
	return func() {
		for _, f := range undo {
			f()
		}
	}
}

const (
	followEvery  = 300 * time.Millisecond
	refreshEvery = time.Second // minimum time between two preview refreshes
	// maxPatience is how many times new rows are held back while the user types: fzf
	// drops keys that arrive while it reads rows.
	maxPatience = 5
)

// follow keeps the rows that fzf shows up to date, until ctx ends.
func (p *Picker) follow(ctx context.Context, r *workDir, shown, previewed string) {
	_ = p.find(ctx) // without clones the list is shorter
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	var at cursor
	var refreshed time.Time
	for patience := maxPatience; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		before := at
		var err error
		if at, err = r.cursor(ctx); err != nil {
			continue // fzf does not listen yet, or has ended
		}
		lines, observations, err := p.now(ctx)
		if err != nil {
			continue // such as a busy store; the shown rows stay
		}
		text := strings.Join(lines, "\n")
		switch {
		case text == shown:
			patience = maxPatience
			if observations == previewed || time.Since(refreshed) < refreshEvery {
				continue
			}
			if r.post(ctx, "refresh-preview") == nil {
				previewed, refreshed = observations, time.Now()
			}
		case at != before && patience > 0:
			patience--
		default:
			// track-current applies to this reload: it keeps the cursor and the marks
			// on their rows by --id-nth. The next change of the query turns it off.
			err := atomicfile.WriteUnflushed(r.rows(), []byte(text+"\n"), 0o600)
			if err == nil {
				err = r.post(ctx, `track-current+reload-sync(cat "$`+rowsVar+`")`)
			}
			if err == nil {
				shown, previewed, patience = text, observations, maxPatience
			}
		}
	}
}

// GiveScreen makes the fzf that started this process give its screen to an action on the
// targets that are sessions. It sends the request over fzf's socket, because only then fzf
// reads no keys meanwhile. With an execute that follows a wait, the command and fzf would
// compete for the keys.
func GiveScreen(ctx context.Context, action string, targets []Target) error {
	var keys []string
	for _, t := range targets {
		if t.Session != "" {
			keys = append(keys, sessionKey(t.Host, t.Session))
		}
	}
	if len(keys) == 0 {
		return nil
	}
	// Ctrl-C must end the line there, like Enter does. As a signal it would also reach
	// fzf, which would end if the command exits before fzf looks.
	return currentWorkDir().post(ctx, `execute:s=$(stty -g); stty -isig eol ^C; `+self+action+` `+ssh.Quote(keys...)+`; stty "$s"`)
}

// Say returns the fzf action that shows a text above the rows until a key is pressed.
func Say(text string) string {
	text = termtext.Line(text)
	return "change-header[" + strings.ReplaceAll(text, "]", ")") + "]"
}

// UnknownTarget is the response to a typed text that matches no row and names no repository.
var UnknownTarget = Say("not found: type OWNER/REPO or the path of a clone")

// Accept is the fzf action that ends fzf with the typed text.
const Accept = "print(" + ActionTyped + ")+accept"
