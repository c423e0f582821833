package sessioncmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

func NewRecordingsCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "recordings", Short: "List, play, search and export recordings of terminals",
		Long: `List, play, search and export recordings of terminals.

The output of tasks is recorded, unless "recordings.tasks" is off. The windows of sessions
are recorded where "record" is on, in the settings or a profile. Secrets are redacted, and
old recordings are removed, also those of sessions and tasks that have ended.`,
		Example: `  agent-sessionizer recordings list
  agent-sessionizer recordings search "FAIL: Test"
  agent-sessionizer recordings play 3f2a9c1b7d4e-2`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newRecordingsListCmd(a), newRecordingsPlayCmd(a), newRecordingsSearchCmd(a), newRecordingsExportCmd(a), newRecordingsRemoveCmd(a))
	return cmd
}

func newRecordingsListCmd(a *app.App) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "list [SESSION|TASK]", Short: "List recordings, newest first",
		Example: `  agent-sessionizer recordings list
  agent-sessionizer recordings list owner/repo`,
		Args: app.Usage(cobra.MaximumNArgs(1)), ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			what := ""
			if len(args) > 0 {
				what = args[0]
			}
			return runRecordingsList(cmd.Context(), a, what, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func runRecordingsList(ctx context.Context, a *app.App, what string, asJSON bool) error {
	h, subject, err := recordingSubject(ctx, a, what)
	if err != nil {
		return err
	}
	list, err := ops.ListRecordings.On(ctx, h, ops.RecordingQuery{Subject: subject})
	if err != nil {
		return err
	}
	if asJSON {
		return a.Con.JSON(list.Recordings)
	}
	if len(list.Recordings) == 0 {
		a.Con.Say("%s", `no recordings; the settings "record" and "recordings.tasks" select what is recorded`)
		return nil
	}
	var rows [][]string
	for _, r := range list.Recordings {
		rows = append(rows, []string{r.ID, r.Name, r.Title, r.Began.Local().Format("2006-01-02 15:04"), measure.Duration(r.Ended.Sub(r.Began).Truncate(time.Second)).String(), measure.Size(r.Size).Human(), console.Ago(r.Ended)})
	}
	a.Con.Table([]string{"RECORDING", "NAME", "WINDOW", "BEGAN", "LENGTH", "SIZE", "AGE"}, rows)
	return nil
}

// recordingSubject returns the id of a session or task, which may have ended, and its host. The id for "" is "".
func recordingSubject(ctx context.Context, a *app.App, what string) (h ops.Host, id string, err error) {
	if h, err = a.Host(ctx); err != nil || what == "" || ids.Valid(what) {
		return h, what, err
	}
	for _, ended := range []bool{false, true} {
		of, s, err := a.Find(ctx, h, what, ended)
		if err == nil {
			return of, s.ID, nil
		}
		if fail.CodeOf(err) != fail.NotFound {
			return nil, "", err
		}
	}
	t, err := ops.FindTask.On(ctx, h, ops.FindTaskRequest{Name: what})
	if fail.CodeOf(err) != fail.NotFound {
		return h, t.ID, err
	}
	return nil, "", fail.New(fail.NotFound, "no session or task %q", what).WithHint("%s", listRecordings)
}

const listRecordings = "agent-sessionizer recordings list # shows ids; sessions that ended long ago have no name"

// maxMatches is the largest number of matches that a search returns.
const maxMatches = 1000

type recordingsSearchOptions struct {
	session    string
	ignoreCase bool
	limit      int
	json       bool
}

func newRecordingsSearchCmd(a *app.App) *cobra.Command {
	o := recordingsSearchOptions{limit: 50}
	cmd := &cobra.Command{
		Use: "search TEXT", Short: "Find lines that terminals have shown",
		Long: `Find lines that terminals have shown, in all recordings, the latest first.

Each match has a recording and a time in it, which "recordings play RECORDING --at TIME"
shows. It finds text within one line of the terminal, not across lines.`,
		Example: `  agent-sessionizer recordings search "FAIL: Test"
  agent-sessionizer recordings search -i error --session owner/repo`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return runRecordingsSearch(cmd.Context(), a, o, args[0])
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.session, "session", "", "search only this `SESSION` or task")
	f.BoolVarP(&o.ignoreCase, "ignore-case", "i", false, "ignore the case of ASCII letters")
	f.IntVar(&o.limit, "limit", o.limit, "`NUMBER` of matches, at most 1000")
	f.BoolVar(&o.json, "json", false, "print JSON")
	return cmd
}

func runRecordingsSearch(ctx context.Context, a *app.App, o recordingsSearchOptions, text string) error {
	if o.limit < 1 || o.limit > maxMatches {
		return fail.New(fail.Usage, "--limit must be 1 to %d, got %d", maxMatches, o.limit).WithHint("agent-sessionizer recordings search --help")
	}
	h, subject, err := recordingSubject(ctx, a, o.session)
	if err != nil {
		return err
	}
	found, err := ops.SearchRecordings.On(ctx, h, ops.RecordingSearch{Text: text, Subject: subject, IgnoreCase: o.ignoreCase, Limit: o.limit})
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(found)
	}
	if len(found.Matches) == 0 {
		a.Con.Say("%s", "no matches")
		return nil
	}
	var rows [][]string
	for _, m := range found.Matches {
		at := measure.Duration(time.Duration(m.Seconds) * time.Second)
		rows = append(rows, []string{m.Recording, at.String(), m.Name, m.Title, console.Ago(m.Time), m.Line})
	}
	a.Con.Table([]string{"RECORDING", "AT", "NAME", "WINDOW", "AGE", "LINE"}, rows)
	if found.More {
		a.Con.Say("showing the latest %d matches; --limit shows up to %d, --session searches one session", o.limit, maxMatches)
	}
	return nil
}

type recordingsExportOptions struct{ output, format string }

func newRecordingsExportCmd(a *app.App) *cobra.Command {
	o := recordingsExportOptions{format: ops.Asciicast}
	cmd := &cobra.Command{
		Use: "export RECORDING", Short: "Write a recording for a player, or its text",
		Long: `Write a recording as one asciicast v2 file, which asciinema and others play, or as text.
It contains the guest's output, without the secrets that the host knows.`,
		Example: `  agent-sessionizer recordings export 3f2a9c1b7d4e-2 -o session.cast
  agent-sessionizer recordings export 3f2a9c1b7d4e-2 --format text`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(recordingIDs(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runRecordingsExport(cmd.Context(), a, o, args[0])
		},
	}
	cmd.Flags().StringVarP(&o.output, "output", "o", "", "`FILE` to write (default standard output)")
	cmd.Flags().StringVar(&o.format, "format", o.format, "`FORMAT`: asciicast or text")
	return cmd
}

func runRecordingsExport(ctx context.Context, a *app.App, o recordingsExportOptions, id string) (err error) {
	if o.format != ops.Asciicast && o.format != ops.PlainText {
		return fail.New(fail.Usage, "--format must be asciicast or text, got %q", o.format).WithHint("agent-sessionizer recordings export --help")
	}
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	r, err := h.Read(ctx, ops.File{Recording: id, Format: o.format})
	if err != nil {
		return err
	}
	defer r.Close()
	if o.output == "" {
		_, err = io.Copy(a.Con.Out, r)
		return err
	}
	f, err := os.OpenFile(o.output, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fail.New(fail.Usage, "create file: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(f, r)
	return err
}

func newRecordingsRemoveCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "rm RECORDING…", Short: "Remove recordings",
		Long: `Remove recordings. The name or id of a session or task removes all of its recordings. A
terminal that is being recorded continues in a new recording.`,
		Example: `  agent-sessionizer recordings rm 3f2a9c1b7d4e-2
  agent-sessionizer recordings rm owner/repo`,
		Args: app.Usage(cobra.MinimumNArgs(1)), ValidArgsFunction: complete.Many(recordingIDs(a)),
		RunE: func(cmd *cobra.Command, args []string) error { return runRecordingsRemove(cmd.Context(), a, args) },
	}
}

func runRecordingsRemove(ctx context.Context, a *app.App, all []string) error {
	for _, what := range all {
		h, err := a.Host(ctx)
		if err != nil {
			return err
		}
		removed, err := ops.RemoveRecordings.On(ctx, h, ops.RecordingsOf{ID: short(what)})
		if fail.CodeOf(err) == fail.NotFound && !ids.Valid(what) { // it may be a name
			var subject string
			if h, subject, err = recordingSubject(ctx, a, what); err == nil {
				removed, err = ops.RemoveRecordings.On(ctx, h, ops.RecordingsOf{ID: subject})
			} else if fail.CodeOf(err) == fail.NotFound {
				err = fail.New(fail.NotFound, "no recording, session or task %q", what).WithHint("%s", listRecordings)
			}
		}
		if err != nil {
			return err
		}
		a.Con.Say("removed %s (%v)", what, measure.Size(removed.Size).Human())
	}
	return nil
}

// short returns the beginning of a text, for a request that limits it.
func short(text string) string { return text[:min(len(text), 22)] }

// recordingIDs offers the recordings of this host.
func recordingIDs(a *app.App) complete.Lister {
	return func(cmd *cobra.Command, _ []string) (offer []string) {
		ctx, cancel := context.WithTimeout(complete.ContextOf(cmd), complete.CompletionTime)
		defer cancel()
		h, err := a.Host(ctx)
		if err != nil {
			return nil
		}
		list, err := ops.ListRecordings.On(ctx, h, ops.RecordingQuery{})
		if err != nil {
			return nil
		}
		for _, r := range list.Recordings {
			offer = append(offer, fmt.Sprintf("%s\t%s %s", r.ID, r.Name, r.Title))
		}
		return slices.Compact(offer)
	}
}
