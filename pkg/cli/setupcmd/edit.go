package setupcmd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func newConfigEditCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "edit [FILE]", Short: "Edit a settings file and check it before saving",
		Long: `Edit one of your settings files: config.yaml (the default), resources.yaml,
network-allowlist.txt, repos.txt or network-groups/NAME.txt. A file that you do not have
yet starts as a copy of the shipped one.

$VISUAL or $EDITOR edits a draft, which replaces the file only if it has no errors.
Otherwise the draft is kept, and the next "config edit" continues with it.`,
		Example: `  agent-sessionizer config edit
  agent-sessionizer config edit network-allowlist.txt
  EDITOR='code --wait' agent-sessionizer config edit network-groups/internal.txt`,
		Args: app.Usage(cobra.MaximumNArgs(1)), ValidArgsFunction: complete.Args(settingsNames(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runConfigEdit(cmd.Context(), a, append(args, settingsFiles[0])[0])
		},
	}
}

// edit edits one settings file through a draft.
type edit struct {
	app   *app.App
	paths config.Paths
	ship  fs.FS
	name  string // relative to the settings directory
	path  string // the file to replace, with symbolic links resolved
	draft string // path of the draft, the copy that the editor opens
	made  bool   // whether open created the draft's directory
}

func runConfigEdit(ctx context.Context, a *app.App, name string) error {
	name = filepath.Clean(name)
	group, isGroup := strings.CutPrefix(name, groupsFolder+"/")
	group, isGroup = strings.TrimSuffix(group, ".txt"), isGroup && strings.HasSuffix(group, ".txt")
	if known := slices.Contains(settingsFiles, name) || isGroup && policy.GroupName(group); !known {
		return fail.New(fail.Usage, "unknown settings file %q: must be one of %s or %s/NAME.txt", name, strings.Join(settingsFiles, ", "), groupsFolder).
			WithHint("agent-sessionizer config edit --help")
	}
	paths, err := config.DefaultPaths()
	if err != nil {
		return err
	}
	ship, err := app.ShippedSettings()
	if err != nil {
		return err
	}
	lock, free, err := lockfile.Try(filepath.Join(paths.State, "locks", "config-edit"))
	if err != nil {
		return err
	}
	if !free {
		return fail.New(fail.Conflict, "edit settings: another config edit is running")
	}
	defer lock.Unlock()
	e := &edit{app: a, paths: paths, ship: ship, name: name, path: filepath.Join(paths.Config, name)}
	e.draft = filepath.Join(filepath.Dir(e.path), ".edit-"+filepath.Base(e.path))
	if to, err := filepath.EvalSymlinks(e.path); err == nil {
		e.path = to
	}
	return e.run(ctx)
}

func (e *edit) run(ctx context.Context) error {
	was, err := os.ReadFile(e.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail.New(fail.Usage, "read settings: %w", err)
	}
	begin := was
	if err != nil {
		begin = e.blank()
	}
	if err := e.open(begin); err != nil {
		return err
	}
	if e.made {
		defer os.Remove(filepath.Dir(e.draft)) //nolint:errcheck // fails if the directory is not empty, which is fine
	}
	for {
		if err := app.Edit(ctx, e.draft); err != nil {
			return e.abandon(begin, err)
		}
		text, err := os.ReadFile(e.draft)
		if err != nil {
			return fail.New(fail.Host, "read draft: %w", err)
		}
		if bytes.Equal(text, begin) {
			e.app.Con.Say("%s", "no changes")
			return os.Remove(e.draft)
		}
		if err := e.check(text); err != nil {
			if e.askToRetry(err) {
				continue
			}
			return e.abandon(begin, err)
		}
		if now, err := os.ReadFile(e.path); err == nil && !bytes.Equal(now, was) || errors.Is(err, fs.ErrNotExist) && was != nil {
			return e.abandon(begin, fail.New(fail.Conflict, "%s was changed by another process", e.path).WithHint("diff %s %s", e.path, e.draft))
		}
		if err := replaceFile(e.path, text); err != nil {
			return e.abandon(begin, err)
		}
		e.app.Con.Say("%s", "wrote "+e.path)
		return os.Remove(e.draft)
	}
}

// blank returns the initial text of a file that the user does not have.
func (e *edit) blank() []byte {
	text, err := fs.ReadFile(e.ship, filepath.ToSlash(e.name))
	if err != nil {
		return []byte("# Entries as in network-allowlist.txt. Use @" + strings.TrimSuffix(filepath.Base(e.name), ".txt") + " to refer to all of them.\n")
	}
	return text
}

// open creates the draft, or finds one that an earlier edit left.
func (e *edit) open(begin []byte) error {
	_, err := os.Stat(filepath.Dir(e.draft))
	e.made = errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(filepath.Dir(e.draft), 0o700); err != nil {
		return fail.New(fail.Host, "create settings directory: %w", err)
	}
	f, err := os.OpenFile(e.draft, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, fs.ErrExist) {
		e.app.Con.Say("continuing the draft in %s; to start over, remove it", e.draft)
		kept, kerr := os.Stat(e.draft)
		file, ferr := os.Stat(e.path)
		if kerr == nil && ferr == nil && file.ModTime().After(kept.ModTime()) {
			e.app.Con.Warn("%s is newer than the draft; compare: diff %s %s", e.path, e.path, e.draft)
		}
		return kerr
	}
	if err != nil {
		return fail.New(fail.Host, "create draft: %w", err)
	}
	_, err = f.Write(begin)
	if err := errors.Join(err, f.Close()); err != nil {
		return fail.New(fail.Host, "create draft: %w", errors.Join(err, os.Remove(e.draft)))
	}
	return nil
}

// check returns what is wrong with text as the content of the file. An error in another
// file that existed before is only shown as a warning.
func (e *edit) check(text []byte) error {
	if e.name == "repos.txt" {
		_, err := app.ParseRepos(e.path, text, true)
		return err
	}
	err := config.Check(e.paths, e.ship, e.name, text)
	if err == nil || strings.HasPrefix(err.Error(), filepath.Join(e.paths.Config, e.name)) {
		return err
	}
	if _, before := config.Load(e.paths, e.ship); before != nil && before.Error() == err.Error() {
		e.app.Con.Warn("%v", err)
		return nil
	}
	return err
}

// askToRetry shows an error and asks whether to return to the editor. Without a terminal it
// returns false.
func (e *edit) askToRetry(err error) bool {
	tty, terr := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if terr != nil {
		return false
	}
	tty.Close()
	e.app.Con.Fail(fail.New(fail.CodeOf(err), "%s", err)) // without the hint, which is to edit the file
	answer, err := e.app.Ask("Edit again? [Y/n] ")
	return err == nil && !strings.HasPrefix(strings.ToLower(answer), "n")
}

// abandon ends without a change. It keeps a draft that differs from begin.
func (e *edit) abandon(begin []byte, cause error) error {
	text, err := os.ReadFile(e.draft)
	if err == nil && bytes.Equal(text, begin) {
		return errors.Join(cause, os.Remove(e.draft))
	}
	kept := fail.New(fail.CodeOf(cause), "%w; %s is unchanged, and your edits are in %s", cause, filepath.Base(e.path), e.draft)
	if fail.CodeOf(cause) == fail.Conflict {
		return kept
	}
	return kept.WithHint("agent-sessionizer config edit %s", e.name)
}

// replaceFile replaces a file atomically and keeps its mode. Even after a crash, a reader
// sees the old text or the new one.
func replaceFile(path string, text []byte) error {
	mode := os.FileMode(0o600)
	if st, err := os.Stat(path); err == nil {
		mode = st.Mode().Perm()
	}
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	if err == nil {
		err = atomicfile.Write(path, text, mode)
	}
	if err != nil {
		return fail.New(fail.Host, "write %s: %w", path, err)
	}
	return nil
}

// settingsNames offers the files that config edit accepts.
func settingsNames(a *app.App) complete.Lister {
	return func(*cobra.Command, []string) []string {
		names := slices.Clone(settingsFiles)
		cfg, err := a.Settings()
		if err != nil {
			return names // the user may want to edit exactly because of this error
		}
		for name, rules := range cfg.Groups() {
			names = append(names, fmt.Sprintf("%s/%s.txt\t%s", groupsFolder, name, complete.Count(len(rules), "name")))
		}
		slices.Sort(names[len(settingsFiles):])
		return names
	}
}
