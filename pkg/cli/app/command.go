package app

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Version is set at build time.
var Version = "dev"

// RemoteExit is the exit status of a command that ran in a guest. It becomes this program's
// exit status unchanged.
type RemoteExit int

func (e RemoteExit) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// ChangedFlags returns the flags that were set on cmd, as arguments.
func ChangedFlags(cmd *cobra.Command) []string {
	var args []string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		for _, v := range values {
			switch f.NoOptDefVal {
			case "":
				args = append(args, "--"+f.Name, v)
			case v:
				args = append(args, "--"+f.Name)
			default:
				args = append(args, "--"+f.Name+"="+v)
			}
		}
	})
	return args
}

// Usage turns cobra's errors about arguments into usage errors.
func Usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return fail.New(fail.Usage, "%w", err).WithHint("%s --help", cmd.CommandPath())
		}
		return nil
	}
}

// QuietLog discards what a driver logs for a command that shows progress itself.
func QuietLog() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }
