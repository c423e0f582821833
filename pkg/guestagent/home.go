package guestagent

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
)

// shippedDotfiles holds the files that the provision scripts last put into the home
// directory, under the same names.
const shippedDotfiles = "/var/lib/agent-sessionizer/dotfiles"

type homeOptions struct {
	first bool
	not   string
	limit int64
}

func homeFlags(f *flag.FlagSet, o *options) {
	f.BoolVar(&o.home.first, "first", false, "")
	f.StringVar(&o.home.not, "not", "", "")
	f.Int64Var(&o.home.limit, "max", 0, "")
}

func bringHome(_ context.Context, c *call) error {
	return inHome(c, "bring", func(root *os.Root) ([]homearchive.Left, error) {
		return homearchive.Bring(root, c.in, homearchive.BringOptions{First: c.home.first, Shipped: c.isShipped})
	})
}

func restoreHome(_ context.Context, c *call) error {
	return inHome(c, "restore", func(root *os.Root) ([]homearchive.Left, error) {
		return homearchive.Restore(root, c.in, homearchive.RestoreOptions{First: c.home.first, Patterns: c.args, Not: c.home.not, Bounds: homearchive.SaveBounds(c.home.limit)})
	})
}

func saveHome(_ context.Context, c *call) error {
	return inHome(c, "save", func(root *os.Root) ([]homearchive.Left, error) {
		brought := homearchive.Brought(root)
		return homearchive.Save(c.out, root, homearchive.SaveOptions{
			Patterns: c.args, Not: c.home.not, Bounds: homearchive.SaveBounds(c.home.limit),
			Ours: func(name string, mode fs.FileMode, content []byte) bool {
				return brought(name, mode, content) || c.isShipped(name, content)
			},
		})
	})
}

// inHome works on the home directory of the user that runs the program, which is the
// agent. It reports each file that was left out as a line on errs.
func inHome(c *call, verb string, do func(*os.Root) ([]homearchive.Left, error)) error {
	dir, err := os.UserHomeDir()
	if err != nil {
		return fail.New(fail.Host, "home: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fail.New(fail.Host, "home: %w", err)
	}
	defer root.Close()
	left, err := do(root)
	for _, l := range left {
		fmt.Fprintln(c.errs, guestproto.Clean(l.String()))
	}
	if err != nil {
		return fail.New(fail.Failure, "home %s: %w", verb, err)
	}
	return nil
}

// isShipped reports whether a file of the home directory is unchanged since
// provisioning.
func (c *call) isShipped(name string, content []byte) bool {
	text, err := os.ReadFile(filepath.Join(c.guest.Path(shippedDotfiles), name))
	return err == nil && bytes.Equal(text, content)
}
