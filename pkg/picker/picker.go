// Package picker is the list from which a person chooses: sessions first, by
// how much they need somebody, then repositories that have none. It runs fzf in
// this process, keeps its rows to what the store says while it is open, and
// draws the preview.
//
// It reads the store and files. It asks no guest, no VM and no network, and it
// carries out nothing: the command line does, with the keys that rows have.
// Whatever it shows may have come from a guest or from a repository, and is
// made harmless first.
package picker

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	fzf "github.com/junegunn/fzf/src"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/plain"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Command is the hidden command that fzf runs for keys and the preview:
// Command ACTION [KEY…].
const Command = "picker"

// The actions.
const (
	ActionPreview = "preview" // of a row
	ActionTyped   = "typed"   // Enter where no row fits
	ActionOpen    = "open"    // and stay in the picker
	ActionStop    = "stop"
	ActionDestroy = "destroy" // shows ActionAsk
	ActionAsk     = "ask"     // whether to destroy
	ActionCopy    = "copy"    // the ssh command
)

// The environment of Command, besides fzf's own: commands for a shell are
// constant, so that no path has to be quoted in them.
const (
	selfVar   = "AGENT_SESSIONIZER_PICKER"
	rowsVar   = "AGENT_SESSIONIZER_PICKER_ROWS"
	clientVar = "AGENT_SESSIONIZER_PICKER_CLIENT"
)

// Picker is one picker, or one command that fzf runs for it. Its methods are
// for one goroutine.
type Picker struct {
	Manager *session.Manager
	Console *console.Console
	Listed  []string // repos.txt
	Client  string   // tmux client that is picked for, "" when it is not known
	Unicode bool     // see Unicode

	clones     cloneCacheReader
	endedLast  []session.Session
	endedFor   string
	endedKnown bool
}

// New is a picker of what m knows.
func New(m *session.Manager, con *console.Console, listed []string) *Picker {
	return &Picker{
		Manager: m, Console: con, Listed: listed, Unicode: Unicode(os.Getenv),
		clones: cloneCacheReader{file: cloneCache(m.Config.Paths), roots: m.Config.Roots},
	}
}

// Client is the tmux client for which the picker runs that started this command.
func Client() string { return os.Getenv(clientVar) }

// Unicode reports whether the locale has more than ASCII.
func Unicode(env func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := env(name); v != "" {
			v = strings.ToLower(v)
			return strings.Contains(v, "utf-8") || strings.Contains(v, "utf8")
		}
	}
	return false
}

// Pick is what was picked.
type Pick struct {
	Open []Target // in the order in which they were marked; the first is gone to
	Exit int      // fzf's exit status when nothing was
}

// Run shows the picker until something is picked. It may be called once in a
// process, which is how fzf is made.
func (p *Picker) Run(ctx context.Context) (Pick, error) {
	lines, glances, err := p.now(ctx)
	if err != nil {
		return Pick{}, err
	}
	r, err := enter()
	if err != nil {
		return Pick{}, err
	}
	defer r.leave() //nolint:errcheck // what is left, the next picker removes

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
	tasks.Go(func() { p.follow(following, r, strings.Join(lines, "\n"), glances) })

	code, err := fzf.Run(opts)
	close(opts.Output)
	stop()
	tasks.Wait()
	if err != nil {
		return Pick{}, fail.New(fail.Host, "fzf: %w", err)
	}
	return picked(code, out)
}

// picked reads fzf's output: the query, the word of ActionTyped if that was
// asked for, and the keys of rows.
func picked(code int, out []string) (Pick, error) {
	if code != fzf.ExitOk && code != fzf.ExitNoMatch || len(out) == 0 {
		return Pick{Exit: code}, nil
	}
	query, rest := out[0], out[1:]
	if slices.Contains(rest, ActionTyped) {
		open, ok := Typed(query)
		if !ok {
			return Pick{}, fail.New(fail.Usage, "%q is no repository", query)
		}
		return Pick{Open: []Target{{Repo: open}}}, nil
	}
	var pick Pick
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

// now is the rows as they are now, and what changes with what previews show.
func (p *Picker) now(ctx context.Context) (lines []string, glances string, err error) {
	sights, repos, err := p.read(ctx)
	if err != nil {
		return nil, "", err
	}
	for _, s := range sights {
		glances += fmt.Sprintf("%s %d %s ", s.ID, s.seen.UnixNano(), s.ErrorMessage)
	}
	return p.lines(sights, repos, time.Now()), glances, nil
}

const (
	header = "enter open  tab mark  ^o stay  ^s stop  ^x destroy\n" +
		"^y copy ssh  ? preview  alt-enter open as typed"
	self = `"$` + selfVar + `" ` + Command + ` `
)

func (p *Picker) options(r *room) (*fzf.Options, error) {
	args := []string{
		"--ansi", "--multi", "--layout=reverse", "--info=hidden", "--prompt=> ",
		"--ghost=a session, or owner/repo, a git URL, ./path", "--header=" + header,
		"--with-shell=sh -c", "--listen=" + r.socket(),
		// Of a row, the key is for us and the rest for people.
		"--delimiter=\t", "--with-nth=2", "--accept-nth=1", "--id-nth=1", "--print-query",
		// Without a query the order is ours; with one, what fits better comes first.
		"--scheme=default", "--tiebreak=index",
		"--preview=" + self + ActionPreview + " {1}",
		"--preview-window=right,50%,border-left,<50(down,50%,border-top)",

		// A cursor that follows its row is right when rows come and go, and wrong
		// while a query is typed, so --track is not on all the time: see follow.
		"--bind=change:untrack-current+first+change-header[" + header + "]",
		"--bind=focus:transform(" + skipLine + ")",
		// A key is for the row that fits what was typed before it, which may not be
		// on the screen yet.
		"--bind=enter:wait+transform(" + enterKey + ")",
		"--bind=double-click:wait+transform(" + enterKey + ")",
		"--bind=alt-enter:transform(" + self + ActionTyped + ")",
		"--bind=ctrl-o:wait+bg-transform(" + self + ActionOpen + " {+1})+clear-multi",
		"--bind=ctrl-s:wait+bg-transform(" + self + ActionStop + " {+1})+clear-multi",
		"--bind=ctrl-x:wait+bg-transform(" + self + ActionDestroy + " {+1})+clear-multi",
		"--bind=ctrl-y:wait+bg-transform(" + self + ActionCopy + " {1})",
		"--bind=?:toggle-preview",
	}
	if !p.Unicode {
		args = append(args, "--no-unicode")
	}
	// Of the user's own settings for fzf only the colours: a key or an option
	// among them could make the picker do something else.
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
	// skipLine moves the cursor on, in the direction in which it came.
	skipLine = `[ x{1} != x- ] || case "$FZF_ACTION" in *up*|*prev*) echo up;; *) echo down;; esac`
	// Rows may go between the look and the accepting, which would end fzf with nothing.
	enterKey = `if [ "$FZF_MATCH_COUNT$FZF_SELECT_COUNT" = 00 ]; then ` + self + ActionTyped + `; elif [ x{1} != x- ]; then echo accept-non-empty; fi`
)

// setenv prepares the environment of what fzf runs; restore takes it back.
func (p *Picker) setenv(r *room) (restore func()) {
	vars := map[string]string{selfVar: p.Manager.Self, rowsVar: r.rows(), clientVar: p.Client}
	if p.Console.Color() {
		vars["CLICOLOR_FORCE"] = "1" // the preview is a pipe
	}
	var undo []func()
	for name, value := range vars {
		before, had := os.LookupEnv(name)
		undo = append(undo, func() {
			if had {
				_ = os.Setenv(name, before) // it was one before
			} else {
				_ = os.Unsetenv(name)
			}
		})
		_ = os.Setenv(name, value) // fails for impossible names only
	}
	return func() {
		for _, f := range undo {
			f()
		}
	}
}

const (
	followEvery  = 300 * time.Millisecond
	refreshEvery = time.Second // the preview at most
	// maxPatience is how many times rows are left as they are because somebody
	// types: fzf drops the keys that come while it reads.
	maxPatience = 5
)

// follow keeps the rows that fzf shows to what there is, until ctx ends.
func (p *Picker) follow(ctx context.Context, r *room, shown, previewed string) {
	_ = p.find(ctx) // without clones the list is shorter
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	var at hands
	var refreshed time.Time
	for patience := maxPatience; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		before := at
		var err error
		if at, err = r.hands(ctx); err != nil {
			continue // it has not begun to listen, or has ended
		}
		lines, glances, err := p.now(ctx)
		if err != nil {
			continue // busy, say; what is shown stays
		}
		text := strings.Join(lines, "\n")
		switch {
		case text == shown:
			patience = maxPatience
			if glances == previewed || time.Since(refreshed) < refreshEvery {
				continue
			}
			if r.post(ctx, "refresh-preview") == nil {
				previewed, refreshed = glances, time.Now()
			}
		case at != before && patience > 0:
			patience--
		default:
			// track-current is for this reload: it keeps the cursor and the marks on
			// their rows by --id-nth. The next change of the query takes it back.
			err := atomicfile.WriteUnflushed(r.rows(), []byte(text+"\n"), 0o600)
			if err == nil {
				err = r.post(ctx, `track-current+reload-sync(cat "$`+rowsVar+`")`)
			}
			if err == nil {
				shown, previewed, patience = text, glances, maxPatience
			}
		}
	}
}

// Ask has fzf, in whose picker this process was started, give its screen to
// ActionAsk. It comes over fzf's socket, since only then fzf reads no keys meanwhile:
// behind a wait that had to wait, execute and fzf share them by chance.
func Ask(ctx context.Context, targets []Target) error {
	var keys []string
	for _, t := range targets {
		if t.Session != "" {
			keys = append(keys, sessionKey(t.Session))
		}
	}
	if len(keys) == 0 {
		return nil
	}
	// Ctrl-C ends the line there, as Enter does: as a signal it would also come to
	// fzf, which ends when the command is quicker to do so than it is to look.
	return inside().post(ctx, `execute:s=$(stty -g); stty -isig eol ^C; `+self+ActionAsk+` `+ssh.Quote(keys...)+`; stty "$s"`)
}

// Say is the fzf action that shows a text above the rows until a key is typed.
func Say(text string) string {
	text = plain.Line(text)
	return "change-header[" + strings.ReplaceAll(text, "]", ")") + "]"
}

// SaySo is the answer to a text that is on no row and no repository.
var SaySo = Say("nothing is called that; type OWNER/REPO or ./path")

// Accept ends fzf with what is typed.
const Accept = "print(" + ActionTyped + ")+accept"
