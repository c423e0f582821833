package client

import (
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// checkAnswer refuses the sessions and questions of an answer whose ids are none: they become parts of paths
// and of commands.
func (c *Client) checkAnswer(result any) error {
	var all []session.View
	var questions []ops.Question
	switch r := result.(type) {
	case *session.View:
		all = []session.View{*r}
	case *ops.SessionAnswer:
		all = []session.View{r.View}
	case *ops.Progress:
		all = []session.View{r.Session}
	case *ops.SessionList:
		all = r.Sessions
	case *ops.Question:
		questions = []ops.Question{*r}
	case *ops.QuestionList:
		questions = r.Questions
	}
	for _, q := range questions {
		if !ids.Valid(q.ID) {
			return fail.New(fail.Failure, "%s answered with a question that has an invalid id", c.name)
		}
	}
	for _, s := range all {
		// A session that is gone may have only its name, and the answer to a check has no session.
		if !ids.Valid(s.ID) && s.ID != "" {
			return fail.New(fail.Failure, "%s answered with a session that has an invalid id", c.name)
		}
	}
	return nil
}
