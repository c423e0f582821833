package mcpserver

import (
	"context"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// answerInput is the input of a tool.
type answerInput struct {
	Question string `json:"question" jsonschema:"id of the question, or the session that asks only one"`
	Answer   string `json:"answer" jsonschema:"allow or deny for a permission, a plan or a connection; the new limit or deny for a budget; otherwise a text or the number of a choice; one line for each part"`
}

// questionTools adds the tools for questions.
func questionTools(s *mcp.Server, h ops.Host) {
	addTool(s, reads, "list_questions", "List questions", "List what agents wait for a person to answer.", func(ctx context.Context, _ noInput) (any, error) {
		return ops.ListQuestions.On(ctx, h, ops.QuestionQuery{})
	})
	// What an agent is allowed cannot be taken back.
	addTool(s, destroys, "answer_question", "Answer a question", "Answer a question of an agent. The first answer counts.", func(ctx context.Context, in answerInput) (any, error) {
		q, err := ops.FindQuestion.On(ctx, h, ops.FindQuestionRequest{What: in.Question, Answer: true})
		if err != nil {
			return nil, err
		}
		r := ops.AnswerRequest{QuestionPath: ops.QuestionPath{ID: q.ID}}
		r.Body.Answer = in.Answer
		return ops.AnswerQuestion.On(ctx, h, r)
	})
}
