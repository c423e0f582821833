package guest

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/home"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// BringDotfiles unpacks an archive of home.Dotfiles in the agent's home directory,
// as the agent. With first they replace whatever is there; else what was changed
// in the guest stays. notes say what was not brought.
func (g Guest) BringDotfiles(ctx context.Context, archive io.Reader, first bool) (notes []string, err error) {
	return g.home(ctx, archive, nil, "bring", "--first="+strconv.FormatBool(first))
}

// Keep names what is kept of the agent's home directory.
type Keep struct {
	Patterns home.Patterns
	Not      string // an entry of the home directory that is none of it: the checkout
	Max      int64  // bytes
}

func (k Keep) args(verb string, more ...string) []string {
	args := append([]string{verb, "--not=" + k.Not, "--max=" + strconv.FormatInt(k.Max, 10)}, more...)
	return append(append(args, "--"), k.Patterns...)
}

// SaveHome writes an archive of k to w. It is a guest's work, and the end of what
// was written before an error is anywhere. notes say what was left out.
func (g Guest) SaveHome(ctx context.Context, k Keep, w io.Writer) (notes []string, err error) {
	return g.home(ctx, nil, w, k.args("save")...)
}

// RestoreHome unpacks what SaveHome wrote, of it what k names. With first it
// replaces whatever is there, else it brings only what is not there.
func (g Guest) RestoreHome(ctx context.Context, k Keep, archive io.Reader, first bool) (notes []string, err error) {
	return g.home(ctx, archive, nil, k.args("restore", "--first="+strconv.FormatBool(first))...)
}

// manyNotes bounds how much a guest says of what it left out.
const manyNotes = 25

func (g Guest) home(ctx context.Context, in io.Reader, out io.Writer, args ...string) (notes []string, err error) {
	lines := &progress{report: func(line string) {
		if len(notes) < manyNotes {
			notes = append(notes, line)
		}
	}}
	err = g.SSH.Run(ctx, g.program(append([]string{"home"}, args...)...), ssh.IO{Stdin: in, Stdout: out, Stderr: lines})
	lines.end()
	if err != nil {
		if len(lines.tail) > 0 {
			err = fmt.Errorf("%w: %s", err, lines.tail[len(lines.tail)-1])
		}
		return nil, err
	}
	return notes, nil
}
