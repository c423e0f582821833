package sessioncmd

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/picker"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

// RunPick lets the user choose what to open.
func RunPick(ctx context.Context, a *app.App, o OpenOptions) error {
	if to, err := app.Context(a); err != nil || to.URL != "" {
		return errors.Join(err, fail.New(fail.Usage, "the picker shows only this host, but %s is chosen", to.URL).WithHint("agent-sessionizer list"))
	}
	if !app.Interactive() {
		return fail.New(fail.Usage, "open picker: no terminal").WithHint("agent-sessionizer list --json")
	}
	err := pick(ctx, a, o)
	_, reported := errors.AsType[app.RemoteExit](err)
	if err == nil || reported || o.Client == "" {
		return err
	}
	// A popup closes when this process ends, so keep the error visible.
	a.Con.Fail(err)
	if _, aerr := a.Ask("Press Enter to close this window. "); aerr != nil {
		return errors.Join(err, aerr)
	}
	return app.RemoteExit(fail.CodeOf(err))
}

func pick(ctx context.Context, a *app.App, o OpenOptions) error {
	// fzf handles this process's signals. A Ctrl-C in a screen that a key opened is meant
	// for that screen, but also reaches this process.
	ctx = context.WithoutCancel(ctx)
	p, err := newPicker(ctx, a, a.Manager)
	if err != nil {
		return err
	}
	p.Client = o.Client
	p.Others = a.OtherSessions
	if a.Chosen != "" {
		p.Environ = map[string]string{app.HostVariable: a.Chosen}
	}
	picked, err := p.Run(ctx)
	if err != nil {
		return err
	}
	if len(picked.Open) == 0 {
		return app.RemoteExit(picked.Exit)
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	o.New = picked.New
	// Open the first target last, because this process may then become tmux.
	for _, t := range picked.Open[1:] {
		if err := openAside(ctx, a, o, t); err != nil {
			return err
		}
	}
	return RunOpen(ctx, a, o, picked.Open[0].Open())
}

// openAside opens a target without attaching to it.
func openAside(ctx context.Context, a *app.App, o OpenOptions, t picker.Target) error {
	o.noWait, o.detach = true, true // the user does not wait for it
	return RunOpen(ctx, a, o, t.Open())
}

func newPicker(ctx context.Context, a *app.App, manager func(context.Context) (*session.Manager, error)) (*picker.Picker, error) {
	m, err := manager(ctx)
	if err != nil {
		return nil, err
	}
	repos, err := app.Repos(a)
	if err != nil {
		return nil, err
	}
	return picker.New(m, a.Con, repos), nil
}

// NewPickerCmds returns the commands that fzf runs for the picker, and the one that finds
// local clones.
func NewPickerCmds(a *app.App) []*cobra.Command {
	return []*cobra.Command{
		{
			Use: picker.Command + " ACTION [KEY…]", Hidden: true, Args: app.Usage(cobra.MinimumNArgs(1)),
			RunE: func(cmd *cobra.Command, args []string) error { return runPicker(cmd.Context(), a, args[0], args[1:]) },
		},
		{
			Use: picker.FindCommand, Hidden: true, Args: app.Usage(cobra.NoArgs),
			RunE: func(cmd *cobra.Command, _ []string) error {
				cfg, err := a.Settings()
				if err != nil {
					return err
				}
				return picker.FindClones(cmd.Context(), cfg)
			},
		},
	}
}

// runPicker handles a key of the picker. It prints actions for fzf. The preview and the
// screen that asks before destroying print text instead.
func runPicker(ctx context.Context, a *app.App, action string, keys []string) error {
	var targets []picker.Target
	for _, key := range keys {
		if t, ok := picker.ParseKey(key); ok {
			targets = append(targets, t)
		}
	}
	var say string
	var err error
	switch action {
	case picker.ActionPreview:
		p, err := newPicker(ctx, a, a.PlainManager)
		if err != nil || len(keys) == 0 {
			return err
		}
		columns, _ := strconv.Atoi(os.Getenv("FZF_PREVIEW_COLUMNS"))
		lines, _ := strconv.Atoi(os.Getenv("FZF_PREVIEW_LINES"))
		width, height := cmp.Or(columns, 80), cmp.Or(lines, 24)
		if len(targets) > 0 && targets[0].Host != "" {
			return previewRemote(ctx, a, p, targets[0], width, height)
		}
		return p.Preview(ctx, a.Con.Out, keys[0], width, height)
	case picker.ActionDestroy:
		err = picker.GiveScreen(ctx, picker.ActionAsk, targets)
	case picker.ActionAnswer:
		err = picker.GiveScreen(ctx, picker.ActionReply, targets)
	case picker.ActionReply:
		return answerPicked(ctx, a, targets)
	case picker.ActionAsk:
		return destroyPicked(ctx, a, targets)
	case picker.ActionTyped:
		say = picker.UnknownTarget
		if _, ok := picker.Typed(os.Getenv("FZF_QUERY")); ok {
			say = picker.Accept
		}
	case picker.ActionOpen:
		say, err = openPicked(ctx, a, targets)
	case picker.ActionStop:
		err = stopPicked(ctx, a, targets)
	case picker.ActionCopy:
		say, err = copyPicked(ctx, a, targets)
	default:
		return fail.New(fail.Usage, "unknown picker action %q", action)
	}
	if err != nil {
		text := "error: " + err.Error()
		if hint := fail.HintOf(err); hint != "" {
			text += " (" + hint + ")"
		}
		say = picker.Say(a.Redact.Redact(text))
	}
	if say != "" {
		a.Printf("%s\n", say)
	}
	return nil
}

// previewRemote draws the preview of a session on another host of the cluster.
func previewRemote(ctx context.Context, a *app.App, p *picker.Picker, t picker.Target, width, height int) error {
	ctx, cancel := context.WithTimeout(ctx, app.AskLimit)
	defer cancel()
	return eachSession(ctx, a, a.QuietHost, []picker.Target{t}, func(h ops.Host, s session.View) error {
		seen, err := ops.GetScreen.On(ctx, h, ops.SessionPath{ID: s.ID})
		if code := fail.CodeOf(err); err != nil && code != fail.Conflict && code != fail.NotFound { // its guest has reported nothing
			return err
		}
		return p.PreviewRemote(a.Con.Out, picker.Remote{Host: t.Host, View: s}, seen.Observation, seen.At, width, height)
	})
}

func openPicked(ctx context.Context, a *app.App, targets []picker.Target) (say string, err error) {
	if len(targets) == 0 { // no row matches what the user typed
		open, ok := picker.Typed(os.Getenv("FZF_QUERY"))
		if !ok {
			return picker.UnknownTarget, nil
		}
		targets = []picker.Target{{Repo: open}}
	}
	for _, t := range targets {
		if err := openAside(ctx, a, OpenOptions{}, t); err != nil {
			return "", err
		}
	}
	return "", nil
}

func stopPicked(ctx context.Context, a *app.App, targets []picker.Target) error {
	return eachSession(ctx, a, a.Host, targets, func(h ops.Host, s session.View) error {
		_, err := ops.StopSession.On(ctx, h, ops.StopRequest{SessionPath: ops.SessionPath{ID: s.ID}})
		return err
	})
}

// destroyPicked shows what would be lost, asks, and leaves the work to the keeper.
func destroyPicked(ctx context.Context, a *app.App, targets []picker.Target) error {
	return eachSession(ctx, a, a.Host, targets, func(h ops.Host, s session.View) error {
		a.Con.Say("looking for unsaved work in %s", app.NameOn(h, s.Name))
		lost, err := ops.GetUnsaved.On(ctx, h, ops.SessionPath{ID: s.ID})
		if err != nil {
			return err
		}
		line, err := readLine(termtext.Line(destroyQuestion(h, s, lost)) + " [y/N] ")
		if err != nil || !isYes(line) {
			return err // the session stays
		}
		if _, err = ops.DestroySession.On(ctx, h, ops.DestroyRequest{SessionPath: ops.SessionPath{ID: s.ID}, Force: true}); err != nil {
			a.Con.Fail(err)
			_, err = readLine(goBack)
		}
		return err
	})
}

// answerPicked shows what agents ask, and sends the answers that the user types.
func answerPicked(ctx context.Context, a *app.App, targets []picker.Target) error {
	return eachSession(ctx, a, a.Host, targets, func(h ops.Host, s session.View) error {
		list, err := ops.ListQuestions.On(ctx, h, ops.QuestionQuery{Session: s.ID})
		if err != nil {
			return err
		}
		asked := false
		for _, q := range list.Questions {
			if q.State != store.QuestionOpen {
				continue
			}
			asked = true
			showQuestion(a, q)
			line, err := readLine("Answer, or Enter to leave it open: ")
			if err != nil {
				return err
			}
			if line == "" {
				continue
			}
			r := ops.AnswerRequest{QuestionPath: ops.QuestionPath{ID: q.ID}}
			if r.Body.Answer = line; q.Parts > 1 {
				r.Body.Answer = strings.ReplaceAll(line, ";", "\n")
			}
			if _, err := ops.AnswerQuestion.On(ctx, h, r); err != nil {
				a.Con.Fail(err)
				if _, err := readLine(goBack); err != nil {
					return err
				}
			}
		}
		if !asked {
			a.Con.Say("%s asks nothing that can be answered here", s.DisplayName())
			_, err = readLine(goBack)
		}
		return err
	})
}

const goBack = "Press Enter to go back. "

// readLine asks on a terminal where Ctrl-C is an ordinary key that ends the line. A line
// with Ctrl-C counts as empty.
func readLine(question string) (string, error) {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return "", fail.New(fail.Usage, "open terminal to ask: %w", err)
	}
	defer tty.Close()
	fmt.Fprint(tty, question)
	line := make([]byte, 4096)
	n, err := tty.Read(line) // a line, in the terminal's current mode
	if err != nil && !errors.Is(err, io.EOF) {
		return "", fail.New(fail.Interrupted, "read answer: %w", err)
	}
	if strings.Contains(string(line[:n]), "\x03") {
		return "", nil
	}
	return strings.TrimSpace(string(line[:n])), nil
}

func isYes(line string) bool {
	line = strings.ToLower(line)
	return line == "y" || line == "yes"
}

func copyPicked(ctx context.Context, a *app.App, targets []picker.Target) (say string, err error) {
	err = eachSession(ctx, a, a.Host, targets, func(h ops.Host, s session.View) error {
		command := "agent-sessionizer ssh " + ssh.Quote(app.NameOn(h, s.Name))
		say = picker.Say("copied: " + command)
		if os.Getenv("TMUX") != "" {
			return tmux.Client{}.SetClipboard(ctx, picker.Client(), []byte(command))
		}
		return terminalClipboard(command)
	})
	return say, err
}

// terminalClipboard copies text to the terminal's clipboard, if the terminal permits it.
func terminalClipboard(text string) error {
	tty, err := os.OpenFile("/dev/tty", os.O_WRONLY, 0)
	if err != nil {
		return fail.New(fail.Host, "copy to clipboard: %w", err)
	}
	defer tty.Close()
	_, err = fmt.Fprintf(tty, "\x1b]52;c;%s\a", base64.StdEncoding.EncodeToString([]byte(text)))
	return err
}

// eachSession calls f for each target that is a session. here opens this host.
func eachSession(ctx context.Context, a *app.App, here func(context.Context) (ops.Host, error), targets []picker.Target, f func(ops.Host, session.View) error) error {
	h, err := here(ctx)
	if err != nil {
		return err
	}
	for _, t := range targets {
		if t.Session == "" {
			continue
		}
		on, id, err := a.OnHost(ctx, h, t.Open())
		if err != nil {
			return err
		}
		s, err := ops.GetSession.On(ctx, on, ops.SessionPath{ID: id})
		if err == nil {
			err = f(on, s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
