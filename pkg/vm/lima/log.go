package lima

import (
	"fmt"
	"io"
	"maps"

	"github.com/sirupsen/logrus"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// logHook passes Lima's records to the driver's Log.
type logHook struct {
	log func(level, msg string, fields map[string]any)
}

func (logHook) Levels() []logrus.Level { return logrus.AllLevels }

func (h logHook) Fire(e *logrus.Entry) error {
	if h.log != nil {
		h.log(e.Level.String(), e.Message, maps.Clone(e.Data))
	}
	return nil
}

// fatalExit is the panic value where Lima calls logrus.Fatal, which would otherwise
// end the process.
type fatalExit struct{ code int }

// captureLog silences logrus's standard logger, which is the one Lima uses. It routes
// the records to log, and turns Fatal into a panic that catchFatal recovers.
func captureLog(log func(level, msg string, fields map[string]any)) {
	std := logrus.StandardLogger()
	std.SetOutput(io.Discard)
	std.SetLevel(logrus.InfoLevel)
	std.ReplaceHooks(logrus.LevelHooks{})
	std.AddHook(logHook{log})
	std.ExitFunc = func(code int) { panic(fatalExit{code}) }
}

// catchFatal runs a call into Lima and turns a logrus.Fatal inside it into an error.
func catchFatal(what string, call func() error) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case fatalExit:
			err = fail.New(fail.Host, "%s: Lima exited with status %d", what, r.code).WithHint("agent-sessionizer doctor")
		default:
			panic(r)
		}
	}()
	if err := call(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
