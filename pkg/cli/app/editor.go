package app

import (
	"context"
	"os"
	"os/exec"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Edit runs the user's editor for terminals on a file. The editor can be a command line, as for git.
func Edit(ctx context.Context, file string) error {
	editor, err := chooseEditor(os.Getenv, Interactive(), exec.LookPath)
	if err != nil {
		return err
	}
	// Ctrl-C belongs to the editor: it must not kill the editor with the user's unsaved
	// text.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "sh", "-c", editor+` "$@"`, editor, file)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fail.New(fail.Failure, "run editor (%s): %w", editor, err)
	}
	return nil
}

// AfterEdit returns the context in which to complete what the user has edited. Ctrl-C in an editor also
// cancels ctx, although the user did not mean this program.
func AfterEdit(ctx context.Context) context.Context {
	if ctx.Err() != nil {
		return context.WithoutCancel(ctx)
	}
	return ctx
}

// editors are tried in this order if the user has not chosen one.
var editors = []string{"sensible-editor", "editor", "nano", "vim", "vi"}

func chooseEditor(env func(string) string, terminal bool, look func(string) (string, error)) (string, error) {
	for _, name := range []string{"VISUAL", "EDITOR"} {
		if editor := strings.TrimSpace(env(name)); editor != "" {
			return editor, nil
		}
	}
	if !terminal {
		return "", fail.New(fail.Usage, "start editor: no terminal, and neither VISUAL nor EDITOR is set").WithHint("agent-sessionizer config path")
	}
	for _, editor := range editors {
		if _, err := look(editor); err == nil {
			return editor, nil
		}
	}
	return "", fail.New(fail.Host, "find editor: none of %s is installed", strings.Join(editors, ", ")).WithHint("export EDITOR=/path/to/editor")
}
